"""`kvdoctor baseline`: writes and prunes the findings that a gate knows."""

from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor.cli.gate import with_cache_folder
from kvdoctor.cli.options import (
    GroupedOption,
    chosen_policy,
    command,
    examples,
    given_options,
    policy_options,
    table_options,
)
from kvdoctor.cli.output import closed_pipe_allowed, end, progress_line, quiet_option
from kvdoctor.options import OUTPUT

if TYPE_CHECKING:
    from kvdoctor.api import WrittenBaseline


@command(
    "Record known findings that a gate accepts.",
    epilog=examples(
        ('kvdoctor baseline exports/*/ --reason "the app holds it" --until 2027-03-31', "take in what counts today"),
        ("kvdoctor baseline exports/*/ --prune", "remove what is not found any more"),
        ("kvdoctor baseline exports/*/ --check", "for CI: is the file up to date?"),
    ),
)
@click.argument("paths", nargs=-1)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    help="Write this file.  [default: the policy's, else kvdoctor-baseline.json]",
    cls=GroupedOption,
    group=OUTPUT,
)
@table_options("baseline")
@quiet_option
@policy_options
def baseline(paths: tuple[str, ...], out: str | None, **given: Any) -> NoReturn:
    """Run the gate, and write its findings into its baseline: those that a team lives with.

    Reasons and dates of known findings stay as they are. Exit code 0: done, or up to date. 1: with --check, not up to
    date. 2: wrong usage. 3: something could not be checked; the rest is written.
    """
    from kvdoctor import api

    check = given["check"]
    options = with_cache_folder(given_options())
    with progress_line(quiet=given["quiet"]) as progress:
        done = api.write_baseline(paths, out, policy=chosen_policy(given), progress=progress, **options)
    with closed_pipe_allowed():
        _print(done, check)
    left = done.differs or done.update.left
    end(1 if check and left else 3 if done.update.open else 0)


def _print(done: "WrittenBaseline", check: bool) -> None:
    from kvdoctor.report.safe import printable, shortened

    update, count = done.update, len(done.update.entries)
    for line in (*update.changes, *update.left):
        click.echo(printable(shortened(line, 600)))
    for path in update.open:
        click.echo(printable(shortened(f"not checked: {path}: `kvdoctor gate` says why", 600)), err=True)
    state = f"{'would be' if check else 'was'} written" if done.differs else "up to date"
    click.echo(printable(f"{done.file}: {state}, {count} entr{'y' if count == 1 else 'ies'}"))
