"""The options that mean the same in every command."""

import math
from collections.abc import Callable
from typing import Any

import click

from kvdoctor.choices import CONSUMERS, DTYPES, EXPORTERS, FAIL_ON, REQUIRED
from kvdoctor.kept import MOST_POSITIONS, MOST_ROWS
from kvdoctor.report.formats import FORMATS

OF_THE_OUTPUT = ("format_", "outputs", "quiet", "verbose", "color", "hash_files")
"""Parameters of `shared_options` that are none of a model's options; `hash_files` is one by the name of `hash`."""


def asked_of_a_model(given: dict[str, Any], besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a command line asks of a model, by the names of `kvdoctor.asking`; without what is named `besides`."""
    asked = {name: value for name, value in given.items() if name not in (*OF_THE_OUTPUT, *besides)}
    return {**asked, "hash": given["hash_files"]}


def shared_options(command: "Callable[..., Any]", formats: tuple[str, ...] = FORMATS) -> "Callable[..., Any]":
    """The options that mean the same everywhere; a command may have other `formats`."""
    options = [
        click.option(
            "--format", "format_", type=click.Choice(formats), default="text", help="What goes to standard output."
        ),
        click.option(
            "--output", "outputs", multiple=True, metavar="FORMAT=FILE", help="Also write that format to a file."
        ),
        click.option("--select", multiple=True, metavar="CODES", help="Only these checks: codes, prefixes or names."),
        click.option("--ignore", multiple=True, metavar="CODES", help="Not these checks: codes, prefixes or names."),
        click.option(
            "--fail-on",
            type=click.Choice(FAIL_ON),
            default="error",
            show_default=True,
            help="Lowest severity that makes the exit code 1.",
        ),
        click.option(
            "--consumer",
            type=click.Choice(CONSUMERS),
            default="plain",
            show_default=True,
            help="The loop that will call the model: every present fed back, or the cross-attention cache held.",
        ),
        click.option(
            "--require",
            multiple=True,
            metavar="USES",
            help=f"Uses that must work: {', '.join(REQUIRED)}. Their findings become errors.",
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all inputs made up."
        ),
        click.option("--hash", "hash_files", is_flag=True, help="Put the SHA-256 of each file into the report."),
        click.option("-q", "--quiet", is_flag=True, help="Findings and verdict only."),
        click.option("-v", "--verbose", is_flag=True, help="Every run with its steps, every input and output."),
        click.option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            help="Colour; NO_COLOR is honoured.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _finite(_context: click.Context, _option: click.Parameter, value: float) -> float:
    """Refuse `nan` and `inf`, which would be no limit at all."""
    if not math.isfinite(value):
        raise click.BadParameter("it must be a number of seconds")
    return value


def target_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """The runtimes that the model must live in."""
    return click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="SPEC",
        help="The runtime that the model must live in: onnxruntime==1.16.3, ort-crate==2.0.0-rc.10; may be repeated.",
    )(command)


offline_option = click.option("--offline", is_flag=True, help="Never use the network.")


def load_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """What the memory of the cache is planned for."""
    options = [
        click.option(
            "--batch",
            type=click.IntRange(1, MOST_ROWS),
            help="Show the memory plan for that many sequences; each beam is one. [default: 1]",
        ),
        click.option(
            "--context",
            type=click.IntRange(1, MOST_POSITIONS),
            help="Show it for that many tokens in each sequence. [default: what the config declares]",
        ),
        click.option(
            "--encoder-length",
            type=click.IntRange(1, MOST_POSITIONS),
            help="Show it for that many encoder states. [default: what the graph or the config declares]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def run_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """The options of the commands that run the model."""
    options = [
        click.option(
            "--thorough",
            is_flag=True,
            help="Also what takes long: the full context, a sweep of lengths, other ways to run the file.",
        ),
        click.option("--provider", default="CPUExecutionProvider", show_default=True, help="Execution provider."),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=300.0,
            show_default=True,
            metavar="SECONDS",
            callback=_finite,
            help="Longest time for one answer of the runtime.",
        ),
        click.option(
            "--max-memory",
            type=click.IntRange(min=1),
            metavar="MIB",
            help="Most resident memory of the runtime's process. [default: nine tenths of the machine's]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def afresh_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """What an export made afresh is made from, and how."""
    options = [
        click.option(
            "--from",
            "from_",
            metavar="CHECKPOINT",
            help="Export afresh from this PyTorch checkpoint: a folder, or a model of the hub (asks for the network).",
        ),
        click.option(
            "--exporter",
            type=click.Choice(EXPORTERS),
            help="With --from. [default: by the layout and the findings of PATH]",
        ),
        click.option(
            "--opset",
            type=click.IntRange(7, 40),
            metavar="N",
            help="Lower the opset to N; with --from, export with it. [default: that of PATH]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            help="With --from. [default: that of PATH's cache, else fp32]",
        ),
        click.option("--task", metavar="TASK", help="With --from and optimum: its name of the task."),
        click.option(
            "--because",
            metavar="REPORT",
            help="With --from: choose by this JSON report of PATH, and do not diagnose it again.",
        ),
        click.option("--offline", is_flag=True, help="Never use the network."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
