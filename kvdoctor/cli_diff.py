"""`kvdoctor diff`: parse, call, print, exit code."""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor import cli_output
from kvdoctor.choices import AGREE
from kvdoctor.cli_options import asked_of_a_model, offline_option, run_options, shared_options, target_options

if TYPE_CHECKING:
    from kvdoctor.report.diff_document import DiffReport

FORMATS = ("text", "json", "markdown")
EPILOG = """
Examples:

\b
  kvdoctor diff exports/v1 exports/v2         is the new export a drop-in for the old one?
  kvdoctor diff yesterday.json exports/v2     the same, against a report of --format json
  kvdoctor diff --static exports/v1 v2.onnx   contract and graph alone, nothing is run
  kvdoctor diff --agree tokens fp32 int8      does the quantised copy choose the same tokens?
"""


@click.command(epilog=EPILOG)
@click.argument("a")
@click.argument("b")
@click.option("--static", is_flag=True, help="Contract and graph alone: nothing is run.")
@click.option(
    "--agree",
    type=click.Choice(AGREE),
    help="B is worse if its logits on the same feeds are not A's this far: the likeliest tokens, within the tolerance "
    "of the arithmetic, bit for bit. [default: other numbers are told, and decide nothing]",
)
@target_options
@offline_option
@partial(shared_options, formats=FORMATS)
@run_options
def diff(a: str, b: str, **given: Any) -> NoReturn:
    """Hold model B against model A: contract, graph and behaviour. Either may be a JSON report of kvdoctor.

    Exit code 0: B is equal, better, or other without being worse. 1: B is worse: a loop written for A would not drive
    it, an experiment that passed fails, or it has a new finding at or above --fail-on. 2: wrong usage. 3: they could
    not be compared.
    """
    from kvdoctor import api
    from kvdoctor.progress import on_terminal

    files = cli_output.outputs(given, FORMATS)
    with on_terminal(given["quiet"]) as told:
        found = api.diff(a, b, **asked_of_a_model(given), progress=told)
    if given["format_"] == "text":
        from kvdoctor.report import diff_text, formats

        diff_text.render(found, formats.console(given["color"]), cli_output.verbosity(given))
    else:
        sys.stdout.write(_renderer(given["format_"])(found))
    sys.stdout.flush()
    cli_output.write([(file, _renderer(name)(found)) for name, file in files])
    raise SystemExit(found.exit_code)


def _renderer(name: str) -> "Callable[[DiffReport], str]":
    from kvdoctor.report import diff_markdown, diff_text, machine

    return {"text": diff_text.plain, "json": machine.render_diff, "markdown": diff_markdown.render}[name]
