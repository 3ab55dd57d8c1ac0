"""The command line: parse, call, print, exit code. Nothing is diagnosed here.

Only click is imported at the top: `--help` and `--version` load neither onnx nor numpy nor rich.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor import __version__
from kvdoctor.errors import KvdoctorError

if TYPE_CHECKING:
    from rich.console import Console

    from kvdoctor.doctor import Options
    from kvdoctor.report.document import Report

FORMATS = ("text", "json", "markdown")
EXAMPLES = """
Examples:

\b
  kvdoctor inspect exports/marian            what the files promise
  kvdoctor step-test exports/marian          what decode steps show
  kvdoctor re-export exports/marian -o fixed a repaired and proved copy
  kvdoctor gate exports/*                    for CI: exit code 0, 1, 2 or 3
"""


@click.group(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="kvdoctor", message="kvdoctor %(version)s")
def cli() -> None:
    """The doctor for ONNX decoders with a KV cache."""


def shared_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """The options that mean the same everywhere."""
    options = [
        click.option("--format", "format_", type=click.Choice(FORMATS), default="text", help="What goes to standard output."),
        click.option("--output", "outputs", multiple=True, metavar="FORMAT=FILE", help="Also write that format to a file."),
        click.option("--select", multiple=True, metavar="CODES", help="Only these checks: codes, prefixes or names."),
        click.option("--ignore", multiple=True, metavar="CODES", help="Not these checks: codes, prefixes or names."),
        click.option(
            "--fail-on",
            type=click.Choice(["note", "warning", "error", "never"]),
            default="error",
            show_default=True,
            help="Lowest severity that makes the exit code 1.",
        ),
        click.option(
            "--consumer",
            type=click.Choice(["plain", "held"]),
            default="plain",
            show_default=True,
            help="The loop that will call the model: every present fed back, or the cross-attention cache held.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all inputs made up."),
        click.option("--hash", "hash_files", is_flag=True, help="Put the SHA-256 of each file into the report."),
        click.option("-q", "--quiet", is_flag=True, help="Findings and verdict only."),
        click.option("-v", "--verbose", is_flag=True, help="Every run with its steps, every input and output."),
        click.option(
            "--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="Colour; NO_COLOR is honoured."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def run_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """The options of the commands that run the model."""
    options = [
        click.option("--provider", default="CPUExecutionProvider", show_default=True, help="Execution provider."),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=300.0,
            show_default=True,
            metavar="SECONDS",
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


@cli.command()
@click.argument("path")
@shared_options
def inspect(path: str, **given: Any) -> NoReturn:
    """Read a model without running it: files, inputs and outputs, the cache contract. Loads no weights."""
    from kvdoctor import doctor

    finish(doctor.inspect(path, _options(given)), given)


@cli.command("step-test")
@click.argument("path")
@shared_options
@run_options
def step_test(path: str, **given: Any) -> NoReturn:
    """Run decode steps with and without the cache, name the failure and its cause."""
    finish(_step_test(path, given), given)


@cli.command("re-export")
@click.argument("path")
@click.option("-o", "--out", required=False, metavar="OUT", help="Folder for the repaired copy; must not exist.")
@click.option("--force", is_flag=True, help="Replace OUT if kvdoctor wrote it.")
@click.option("--dry-run", is_flag=True, help="Say what would be changed, write nothing.")
@click.option("--diff", "show_diff", is_flag=True, help="Show the change node by node, write nothing.")
@shared_options
@run_options
def re_export(path: str, out: str | None, force: bool, dry_run: bool, show_diff: bool, **given: Any) -> NoReturn:
    """Repair the graph into OUT, diagnose the result again, and write a fix report beside it."""
    from kvdoctor import re_exporting

    if out is None and not (dry_run or show_diff):
        raise click.UsageError("give the folder for the repaired copy with -o OUT, or ask with --dry-run")
    plan = re_exporting.Request(path, None if dry_run or show_diff else out, force)
    report = re_exporting.re_export(plan, _options(given))
    finish(report, given, show_diff=show_diff)


@cli.command()
@click.argument("paths", nargs=-1, required=True)
@shared_options
@run_options
def gate(paths: tuple[str, ...], **given: Any) -> NoReturn:
    """Inspect and step-test models for CI. Exit code 0 healthy, 1 findings, 2 wrong usage, 3 could not be checked."""
    from kvdoctor import doctor

    verdict, reports, code = doctor.gate(paths, _options(given))
    if given["format_"] == "json":
        from kvdoctor.report import machine

        sys.stdout.write(machine.render_gate(verdict, reports))
    else:
        for report in reports:
            _print(report, given)
        if len(reports) > 1 and given["format_"] == "text":
            healthy = sum(report.verdict == "healthy" for report in reports)
            click.echo(f"gate: {verdict}; {healthy} of {len(reports)} models healthy")
    for target in given["outputs"]:
        name, file = _split_output(target)
        from kvdoctor.report import machine

        _write(file, machine.render_gate(verdict, reports) if name == "json" else "".join(_rendered(r, name) for r in reports))
    _exit(code)


@cli.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Say what a finding means, how to reproduce it and how to repair it. Without CODE: list all checks."""
    from kvdoctor.findings import all_checks, find_check

    if code is None:
        for check in all_checks():
            click.echo(f"{check.code}  {check.name:<24} {check.summary}")
        return
    found = find_check(code)
    if found is None:
        import difflib

        names = [name for check in all_checks() for name in (check.code, check.name)]
        close = difflib.get_close_matches(code, names, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise click.UsageError(f"there is no check {code!r}{hint} `kvdoctor explain` lists all of them")
    click.echo(f"{found.code} {found.name}\n\n{found.documentation}")


@cli.command()
def env() -> None:
    """Versions, execution providers and extras, each with the command that mends it."""
    from kvdoctor import environment

    for line in environment.lines():
        click.echo(line)


def _step_test(path: str, given: dict[str, Any]) -> "Report":
    from kvdoctor.runtimes import Limits, Runtime

    # Started before anything else is loaded: the worker opens the runtime in the meantime.
    with Runtime(Limits(given["timeout"], given["max_memory"])) as runtime:
        from kvdoctor import doctor

        report = doctor.step_test(path, _options(given), runtime)
        if given["format_"] == "text":
            import kvdoctor.report.text  # noqa: F401
    return report


def _options(given: dict[str, Any]) -> "Options":
    from kvdoctor.doctor import Options
    from kvdoctor.findings import Selection
    from kvdoctor.runtimes import Limits

    return Options(
        consumer=given["consumer"],
        fail_on=given["fail_on"],
        selection=Selection(_codes(given["select"]), _codes(given["ignore"])),
        seed=given["seed"],
        provider=given.get("provider", "CPUExecutionProvider"),
        limits=Limits(given.get("timeout", 300.0), given.get("max_memory")),
        hash_files=given["hash_files"],
    )


def _codes(given: tuple[str, ...]) -> tuple[str, ...]:
    """Split `KV1,KV203`, and refuse what selects nothing: a typing error must not make a gate green."""
    codes = tuple(code.strip() for entry in given for code in entry.split(",") if code.strip())
    if codes:
        from kvdoctor.findings import Selection, all_checks

        for code in codes:
            if not any(Selection((code,)).takes(check.code, check.name) for check in all_checks()):
                raise click.UsageError(f"{code!r} names no check; `kvdoctor explain` lists all of them")
    return codes


def finish(report: "Report", given: dict[str, Any], **more: Any) -> NoReturn:
    """Print a report in the format asked for, write the files asked for, and exit by its verdict."""
    from kvdoctor.report.document import exit_code

    _print(report, given, **more)
    for target in given["outputs"]:
        name, file = _split_output(target)
        _write(file, _rendered(report, name))
    _exit(exit_code(report, given["fail_on"]))


def _print(report: "Report", given: dict[str, Any], **more: Any) -> None:
    if given["format_"] != "text":
        sys.stdout.write(_rendered(report, given["format_"]))
        return
    from kvdoctor.report import text

    verbosity = -1 if given["quiet"] else 1 if given["verbose"] else 0
    text.render(report, _console(given["color"]), verbosity, **more)


def _rendered(report: "Report", name: str) -> str:
    from kvdoctor.report import machine, markdown

    if name == "text":
        from rich.console import Console

        from kvdoctor.report import text

        console = Console(width=text.PIPE_WIDTH, no_color=True, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
        text.render(report, console)
        return console.export_text(styles=False)
    return {"json": machine, "markdown": markdown}[name].render(report)


def _console(color: str) -> "Console":
    from rich.console import Console

    from kvdoctor.report.text import PIPE_WIDTH

    terminal = sys.stdout.isatty()
    forced = {"always": True, "never": terminal, "auto": terminal}[color]
    return Console(
        force_terminal=forced,
        no_color=True if color == "never" else None,
        width=None if terminal else PIPE_WIDTH if not forced else 120,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def _split_output(target: str) -> tuple[str, Path]:
    name, _, file = target.partition("=")
    if name not in FORMATS or not file:
        raise click.UsageError(f"--output takes FORMAT=FILE with a format of {', '.join(FORMATS)}; got {target!r}")
    return name, Path(file)


def _write(file: Path, content: str) -> None:
    """Whole or not at all."""
    from kvdoctor.out_folder import write_whole

    write_whole(file, content)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    raise SystemExit(code)


def main() -> NoReturn:
    """Run the command line. Errors that kvdoctor raises on purpose end with exit code 2 and one line."""
    try:
        cli.main(standalone_mode=False)
        _exit(0)
    except click.ClickException as error:
        error.show()
        raise SystemExit(2) from None
    except click.Abort:
        click.echo("interrupted", err=True)
        raise SystemExit(130) from None
    except KvdoctorError as error:
        from kvdoctor.report.safe import printable

        click.echo(f"kvdoctor: {printable(str(error))}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output has gone: nothing more to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
