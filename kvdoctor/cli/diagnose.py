"""`kvdoctor inspect`, `step-test`, `contract`, `speed`, `re-export`: they read one model, run it or repair a copy."""

from functools import partial
from typing import Any, NoReturn

import click

from kvdoctor.cli.options import chosen_policy, command, examples, given_options, policy_options, table_options
from kvdoctor.cli.output import (
    complain,
    copy_options,
    end,
    finish,
    finish_copy,
    finish_with,
    output_options,
    read_output,
    show,
)

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

    finish_with(api.step_test, given, path)


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
    from kvdoctor.report.escaping import printable, shortened

    output = read_output(given, CONTRACT_FORMATS)
    report = api.read_contracts(path)
    renders = {"text": text.render_contracts, "json": json_format.render_contracts}
    show(output, partial(text.print_contracts, report), lambda name: renders[name](report))
    if not report.stacks:
        reasons = [finding.observed for finding in report.findings] + [entry.reason for entry in report.not_checked]
        complain(f"no cache contract: {printable(shortened('; '.join(reasons), 1200))}")
    end(0 if report.stacks else 3)


@command(
    "Repair a copy of the graph and prove the repair.",
    name="re-export",
    epilog=examples(
        ("kvdoctor re-export exports/marian -o fixed", "a repaired and proved copy"),
        ("kvdoctor re-export exports/marian --dry-run -vv", "the changes, node by node"),
        ("kvdoctor re-export exports/marian -o fixed --target onnxruntime==1.16.3", "for an older runtime"),
        ("kvdoctor re-export exports/marian --from checkpoints/marian -o fresh", "exported again from the checkpoint"),
    ),
)
@click.argument("path", required=False, type=click.Path())
@copy_options("the repaired copy")
@table_options("re-export")
@output_options()
def re_export(path: str | None, **given: Any) -> NoReturn:
    """Repair the graph into OUT, diagnose the result again, and write a fix report next to it.

    With --from CHECKPOINT, export the model again, repair it and compare it with PyTorch; the copy then
    has the inputs and outputs of PATH, which may be left out.
    """
    from kvdoctor import api

    finish_copy(api.re_export, given, path, "the repaired copy")


@command(
    "Measure decoding speed on this machine.",
    epilog=examples(
        ("kvdoctor speed exports/llama --output speed.json", "first token, steps, memory"),
        ("kvdoctor speed exports/llama --against speed.json", "what got slower since"),
    ),
)
@click.argument("path", type=click.Path())
@table_options("speed")
@output_options()
def speed(path: str, **given: Any) -> NoReturn:
    """Measure the time to the first token and of a step, and memory, at several lengths of the past (docs/speed.md).

    Exit code 0: measured, and with --against not worse. 1: something is worse. 2: wrong usage. 3: it could not be
    measured or compared.
    """
    from kvdoctor import api

    finish_with(api.speed, given, path)
