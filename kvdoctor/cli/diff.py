"""`kvdoctor diff`: one model against another."""

from typing import Any, NoReturn

import click

from kvdoctor.cli.options import command, examples, given_options, table_options
from kvdoctor.cli.output import (
    closed_pipe_allowed,
    end,
    output_options,
    print_document,
    progress_line,
    read_output,
    write,
)

FORMATS = ("text", "json", "markdown")


@command(
    "Compare two models: contract, graph and behavior.",
    epilog=examples(
        ("kvdoctor diff exports/v1 exports/v2", "can the new export replace the old one?"),
        ("kvdoctor diff yesterday.json exports/v2", "the same, with a report of --format json"),
        ("kvdoctor diff --static exports/v1 v2.onnx", "contract and graph; nothing is run"),
        ("kvdoctor diff contract.json exports/v2", "does it fulfil that contract? nothing is run"),
        ("kvdoctor diff exports/v2 golden.npz", "against golden numbers of an earlier record"),
        ("kvdoctor diff --agree tokens fp32 int8", "are the likeliest tokens the same?"),
    ),
)
@click.argument("a")
@click.argument("b")
@table_options("diff")
@output_options(FORMATS)
def diff(a: str, b: str, **given: Any) -> NoReturn:
    """Compare model B with model A: contract, graph and behavior.

    Either may be a JSON report of kvdoctor, or a file of golden numbers.

    A may also be a contract that `kvdoctor contract --format json` wrote: then B must fulfil it, and nothing is run.

    Exit code 0: B is equal, better, or different but not worse. 1: B is worse: a loop written for A would not work
    with it, an experiment that passed fails, or it has a new finding at or above --fail-on. 2: wrong usage. 3: they
    could not be compared.
    """
    from kvdoctor import api

    output = read_output(given, FORMATS)
    with progress_line(quiet=given["quiet"]) as progress:
        found = api.diff(a, b, progress=progress, **given_options())
    from kvdoctor.report.diff import print_diff, render

    with closed_pipe_allowed():
        if output.format == "text":
            from kvdoctor.report import text

            print_diff(found, text.open_console(output.color), output.verbosity)
        else:
            print_document(render(found, output.format))
    write([(file, render(found, name)) for name, file in output.files])
    end(found.exit_code)
