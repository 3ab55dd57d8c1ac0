"""`kvdoctor re-export` and `repro`: they write a model."""

from functools import partial
from typing import Any, NoReturn

import click

from kvdoctor.cli.options import GroupedOption, command, examples, given_options, table_options
from kvdoctor.cli.output import finish, output_options, progress_line, read_output
from kvdoctor.options import OUTPUT

_option = partial(click.option, cls=GroupedOption, group=OUTPUT)


@command(
    "Repair a copy of the graph and prove the repair.",
    name="re-export",
    epilog=examples(
        ("kvdoctor re-export exports/marian -o fixed", "a repaired and proved copy"),
        ("kvdoctor re-export exports/marian --diff", "the changes, node by node"),
        ("kvdoctor re-export exports/marian -o fixed --target onnxruntime==1.16.3", "for an older runtime"),
        ("kvdoctor re-export exports/marian --from checkpoints/marian -o fresh", "exported again from the checkpoint"),
    ),
)
@click.argument("path", required=False, type=click.Path())
@_option("-o", "--out", metavar="OUT", help="Write the repaired copy to this folder; it must not exist.")
@_option("--force", is_flag=True, help="Replace OUT if kvdoctor wrote it.")
@_option(
    "--dry-run",
    is_flag=True,
    help="Say what would be repaired and write nothing; the exit code is that of the original.",
)
@_option("--diff", "show_diff", is_flag=True, help="Show the changes node by node, write nothing.")
@table_options("re-export")
@output_options()
def re_export(path: str | None, out: str | None, force: bool, dry_run: bool, show_diff: bool, **given: Any) -> NoReturn:
    """Repair the graph into OUT, diagnose the result again, and write a fix report beside it.

    With --from CHECKPOINT, export the model again, repair it and compare it with PyTorch; PATH is then the model whose
    inputs and outputs are kept, and may be left out.
    """
    from kvdoctor import api

    output = read_output(given)
    if out is None and not (dry_run or show_diff):
        raise click.UsageError("give the folder for the repaired copy with -o OUT, or ask with --dry-run")
    kept = None if dry_run or show_diff else out
    with progress_line(quiet=given["quiet"]) as progress:
        report = api.re_export(path, kept, force=force, progress=progress, **given_options())
    finish(report, output, show_diff=show_diff)


@command(
    "Write the smallest model and script that show a failure.",
    epilog=examples(("kvdoctor repro exports/marian -o to-send", "the failure without the weights")),
)
@click.argument("path", type=click.Path())
@_option("-o", "--out", required=True, metavar="DIR", help="Write the reproducer to this folder; it must not exist.")
@_option("--force", is_flag=True, help="Replace DIR if kvdoctor wrote it.")
@table_options("repro")
@output_options()
def repro(path: str, out: str, force: bool, **given: Any) -> NoReturn:
    """Write the smallest model without weights and the script that show the failure, to send to others.

    The first finding at or above --fail-on that a run shows is reproduced. Exit code 0: nothing to reproduce, and no
    folder. 1: the model has the finding, and DIR shows it. 2: wrong usage. 3: the failure could not be shown without
    the weights, or the model could not be diagnosed; nothing was written.
    """
    from kvdoctor import api

    output = read_output(given)
    with progress_line(quiet=given["quiet"]) as progress:
        report = api.repro(path, out, force=force, progress=progress, **given_options())
    finish(report, output)
