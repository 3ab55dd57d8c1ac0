"""`kvdoctor repro`: the smallest model and script that show a failure."""

from typing import Any, NoReturn

import click

from kvdoctor.cli.options import command, examples, table_options
from kvdoctor.cli.output import finish_with, out_option, output_options


@command(
    "Write the smallest model and script that show a failure.",
    epilog=examples(("kvdoctor repro exports/marian -o to-send", "the failure without the weights")),
)
@click.argument("path", type=click.Path())
@out_option("-o", "--out", required=True, metavar="DIR", help="Write the reproducer to this folder; it must not exist.")
@out_option("--force", is_flag=True, help="Replace DIR if kvdoctor wrote it.")
@table_options("repro")
@output_options()
def repro(path: str, out: str, force: bool, **given: Any) -> NoReturn:
    """Write the smallest model without weights and the script that show the failure, to send to others.

    The first finding at or above --fail-on that a run shows is reproduced. Exit code 0: nothing to reproduce, and no
    folder. 1: the model has the finding, and DIR shows it. 2: wrong usage. 3: the failure could not be shown without
    the weights, or the model could not be diagnosed; nothing was written.
    """
    from kvdoctor.addons.reproducer import api

    finish_with(api.repro, given, path, out, force=force)
