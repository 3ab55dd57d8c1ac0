"""`kvdoctor diff` and `record`: one model against another, or against what it returned before."""

from functools import partial
from typing import Any, NoReturn

import click

from kvdoctor.cli.options import command, examples, given_options, policy_options, table_options
from kvdoctor.cli.output import end, finish_with, out_option, output_options, progress_line, read_output, show

FORMATS = ("text", "json", "markdown")


@command(
    "Compare two models: contract, graph and behavior.",
    epilog=examples(
        ("kvdoctor diff exports/v1 exports/v2", "can the new export replace the old one?"),
        ("kvdoctor diff yesterday.json exports/v2", "the same, with a report of --format json"),
        ("kvdoctor diff --static exports/v1 v2.onnx", "contract and graph; nothing is run"),
        ("kvdoctor diff contract.json exports/v2", "does it fulfil that contract? nothing is run"),
        ("kvdoctor diff exports/v2 golden.json", "against golden numbers of an earlier record"),
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
    from kvdoctor.addons.comparison import api

    output = read_output(given, FORMATS)
    with progress_line(quiet=given["quiet"]) as progress:
        found = api.diff(a, b, progress=progress, **given_options())
    from kvdoctor.addons.comparison.report import print_diff, render

    show(output, partial(print_diff, found), partial(render, found))
    end(found.exit_code)


@command(
    "Keep a small digest of what a healthy model returns.",
    epilog=examples(
        ("kvdoctor record exports/marian -o golden.json", "keep what it returns"),
        (
            "kvdoctor record exports/marian --consumer held -o golden.json --force",
            "for the held loop; replaces the file",
        ),
    ),
)
@click.argument("path", type=click.Path())
@out_option("-o", "--out", metavar="FILE", required=True, help="Write the golden numbers to this file.")
@out_option("--force", is_flag=True, help="Replace FILE if it exists.")
@table_options("record")
@output_options()
@policy_options
def record(path: str, out: str, force: bool, **given: Any) -> NoReturn:
    """Step-test a model, and keep samples of its logits and caches in FILE, for `--against` (docs/golden.md).

    Exit code 0: written. 1: the model has a finding at or above --fail-on; nothing was written. 2: wrong usage. 3:
    something could not be checked; nothing was written.
    """
    from kvdoctor.addons.comparison import api

    finish_with(api.record_golden, given, path, out, force=force)
