"""`kvdoctor record` and `speed`: what a model returns and how fast it is, to be compared with later."""

from functools import partial
from typing import Any, NoReturn

import click

from kvdoctor.cli.options import (
    GroupedOption,
    chosen_policy,
    command,
    examples,
    given_options,
    policy_options,
    table_options,
)
from kvdoctor.cli.output import finish, output_options, progress_line, read_output
from kvdoctor.options import OUTPUT

_option = partial(click.option, cls=GroupedOption, group=OUTPUT)


@command(
    "Keep a small digest of what a healthy model returns.",
    epilog=examples(
        ("kvdoctor record exports/marian -o golden.npz", "keep what it returns"),
        (
            "kvdoctor record exports/marian --consumer held -o golden.npz --force",
            "for the held loop; replaces the file",
        ),
    ),
)
@click.argument("path", type=click.Path())
@_option("-o", "--out", metavar="FILE", required=True, help="Write the golden numbers to this file.")
@_option("--force", is_flag=True, help="Replace FILE if it exists.")
@table_options("record")
@output_options()
@policy_options
def record(path: str, out: str, force: bool, **given: Any) -> NoReturn:
    """Step-test a model, and keep samples of its logits and caches in FILE, for `--against` (docs/golden.md).

    Exit code 0: written. 1: the model has a finding at or above --fail-on; nothing was written. 2: wrong usage. 3:
    something could not be checked; nothing was written.
    """
    from kvdoctor import api

    output = read_output(given)
    with progress_line(quiet=given["quiet"]) as progress:
        report = api.record_golden(
            path, out, force=force, policy=chosen_policy(given), progress=progress, **given_options()
        )
    finish(report, output)


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

    output = read_output(given)
    with progress_line(quiet=given["quiet"]) as progress:
        report = api.speed(path, progress=progress, **given_options())
    finish(report, output)
