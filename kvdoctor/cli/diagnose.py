"""`kvdoctor inspect`, `step-test` and `contract`: they read one model, or run it."""

import os
import sys
from typing import Any, NoReturn

import click

from kvdoctor.cli.options import chosen_policy, command, examples, given_options, policy_options, table_options
from kvdoctor.cli.output import complain, end, finish, output_options, progress_line, read_output, write

CONTRACT_FORMATS = ("text", "json")


@command(
    "Read a model without running it.",
    epilog=examples(
        ("kvdoctor inspect exports/marian", "files, inputs, outputs, the cache contract"),
        ("kvdoctor inspect exports/llama --context 8192 --batch 4", "the memory of the cache"),
        ("kvdoctor inspect exports/llama --weights", "weights that are zero, not finite or stored twice"),
        ("kvdoctor inspect exports/marian --target onnxruntime==1.16.3", "what is too new for it"),
    ),
)
@click.argument("path", type=click.Path())
@table_options("inspect")
@output_options()
@policy_options
def inspect(path: str, **given: Any) -> NoReturn:
    """Read a model without running it: files, inputs and outputs, the cache contract.

    Weights are loaded with --weights only.

    PATH is an .onnx file or the folder of an export. The exit codes are those of step-test.
    """
    from kvdoctor import api

    # Predictions compute with a few numbers at a time: to start threads for products of large matrices would take a
    # tenth of the processor time. No process is started here that would inherit it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    output = read_output(given)
    finish(api.inspect(path, policy=chosen_policy(given), **given_options()), output)


@command(
    "Run decode steps; name the failure and its cause.",
    name="step-test",
    epilog=examples(
        ("kvdoctor step-test exports/marian", "what fails, where, why"),
        ("kvdoctor step-test exports/marian --consumer held", "as Optimum calls it"),
        ("kvdoctor step-test exports/llama --require batch,left-padding", "uses that must work"),
        ("kvdoctor step-test exports/llama --trace loop.jsonl", "your own loop"),
    ),
)
@click.argument("path", type=click.Path())
@table_options("step-test")
@output_options()
@policy_options
def step_test(path: str, **given: Any) -> NoReturn:
    """Run decode steps with and without the cache; name the failure and its cause.

    PATH is an .onnx file or the folder of an export. Exit code 0: healthy. 1: a finding at or above --fail-on. 2: wrong
    usage. 3: something could not be checked.
    """
    from kvdoctor import api

    output = read_output(given)
    with progress_line(quiet=given["quiet"]) as progress:
        report = api.step_test(path, policy=chosen_policy(given), progress=progress, **given_options())
    finish(report, output)


@command(
    "Print what a decode loop must feed, feed back and keep.",
    epilog=examples(
        ("kvdoctor contract exports/marian", "what a loop must feed, feed back and keep"),
        ("kvdoctor contract exports/marian --format json", "for programs"),
    ),
)
@click.argument("path", type=click.Path())
@table_options("contract")
@output_options(CONTRACT_FORMATS)
def contract(path: str, **given: Any) -> NoReturn:
    """Print the cache contract of each stack: what a loop must feed, feed back and keep."""
    from kvdoctor import api
    from kvdoctor.report import json_format, text
    from kvdoctor.report.safe import printable, shortened

    output = read_output(given, CONTRACT_FORMATS)
    report = api.read_contracts(path)
    renders = {"text": text.render_contracts, "json": json_format.render_contracts}
    if output.format == "json":
        sys.stdout.write(json_format.render_contracts(report))
    else:
        text.print_contracts(report, text.open_console(output.color), output.verbosity)
    write([(file, renders[name](report)) for name, file in output.files])
    if not report.stacks:
        reasons = [finding.observed for finding in report.findings] + [entry.reason for entry in report.not_checked]
        complain(f"no cache contract: {printable(shortened('; '.join(reasons), 1200))}")
    end(0 if report.stacks else 3)
