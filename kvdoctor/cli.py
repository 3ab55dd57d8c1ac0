"""The command line: parse, call, print, exit code. Nothing is diagnosed here.

Only click is imported at the top: `--help` and `--version` load neither onnx nor numpy nor rich.
"""

import contextlib
import os
import shutil
import signal
import sys
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor import __version__, cli_examples, cli_output
from kvdoctor.choices import AXIS_NAMES
from kvdoctor.cli_baseline import baseline
from kvdoctor.cli_config import config
from kvdoctor.cli_diff import diff
from kvdoctor.cli_gate import baseline_of, baseline_option, jobs_of
from kvdoctor.cli_options import (
    afresh_options,
    asked_of_a_model,
    load_options,
    offline_option,
    run_options,
    shared_options,
    target_options,
)
from kvdoctor.cli_policy import models_of, policy_of, policy_options, ruled
from kvdoctor.cli_running import gate_options, how_given
from kvdoctor.errors import KvdoctorError

if TYPE_CHECKING:
    from kvdoctor.options import Options
    from kvdoctor.progress import Told
    from kvdoctor.report.document import Report

EXIT_OK, EXIT_INTERRUPTED = 0, 130
EXAMPLES = """
Examples:

\b
  kvdoctor inspect exports/marian            what the files promise
  kvdoctor step-test exports/marian          what decode steps show
  kvdoctor re-export exports/marian -o fixed a repaired and proved copy
  kvdoctor repro exports/marian -o to-send   the failure without the weights, for an issue
  kvdoctor gate exports/*                    for CI: exit code 0, 1, 2 or 3
"""


@click.group(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="kvdoctor", message="kvdoctor %(version)s")
def cli() -> None:
    """The doctor for ONNX decoders with a KV cache."""


@cli.command()
@click.argument("path", type=click.Path())
@load_options
@target_options
@shared_options
@policy_options
def inspect(path: str, **given: Any) -> NoReturn:
    """Read a model without running it: files, inputs and outputs, the cache contract. Loads no weights."""
    from kvdoctor import api

    given = ruled(path, given)
    finish(api.inspect(path, **_asked(given)), given)


@cli.command("step-test")
@click.argument("path", type=click.Path())
@click.option(
    "--contract",
    metavar="FILE",
    help="Take the cache contract from here: `kvdoctor contract MODEL --format json`, edited by hand.",
)
@click.option("--prompt-ids", metavar="IDS", default="", help="Token ids to begin with, as in 1,2,3.")
@click.option("--inputs", metavar="FILE", help="Encoder inputs and input_ids by name, an .npz file.")
@click.option(
    "--reference",
    metavar="CHECKPOINT",
    help="Hold the logits against this PyTorch checkpoint: a folder, or a model of the hub (asks for the network).",
)
@target_options
@offline_option
@click.option(
    "--trace",
    metavar="FILE",
    help="What your own loop fed and got, step by step (docs/trace.md): it is held against the contract and run again.",
)
@shared_options
@run_options
@policy_options
def step_test(path: str, **given: Any) -> NoReturn:
    """Run decode steps with and without the cache, name the failure and its cause."""
    from kvdoctor import api
    from kvdoctor.progress import on_terminal

    given = ruled(path, given)
    with on_terminal(given["quiet"]) as told:
        report = api.step_test(path, **_asked(given, told))
    finish(report, given)


@cli.command("re-export")
@click.argument("path", required=False, type=click.Path())
@click.option("-o", "--out", required=False, metavar="OUT", help="Folder for the repaired copy; must not exist.")
@click.option("--force", is_flag=True, help="Replace OUT if kvdoctor wrote it.")
@click.option("--dry-run", is_flag=True, help="Say what would be changed, write nothing.")
@click.option("--diff", "show_diff", is_flag=True, help="Show the change node by node, write nothing.")
@click.option("--fix", multiple=True, metavar="NAMES", help="Only these repairs, by name (docs/repairs.md).")
@click.option("--keep-unproved", is_flag=True, help="Write OUT although the repair could not be proved.")
@click.option(
    "--layout", metavar="NAME", help="Another layout: merged, pair, optimum, optimum-pair, single (docs/layouts.md)."
)
@click.option("--axes", type=click.Choice(AXIS_NAMES), default="kept", help="Names of open axes.")
@afresh_options
@click.option("--ir-version", type=click.IntRange(min=4), metavar="N", help="Lower the IR version to N.")
@target_options
@shared_options
@run_options
def re_export(path: str | None, out: str | None, force: bool, dry_run: bool, show_diff: bool, **given: Any) -> NoReturn:
    """Repair the graph into OUT, diagnose the result again, and write a fix report beside it.

    With --from CHECKPOINT the model is exported afresh, repaired and held against PyTorch; PATH is then the model whose
    inputs and outputs are kept, and may be left out.
    """
    from kvdoctor import api
    from kvdoctor.progress import on_terminal

    if out is None and not (dry_run or show_diff):
        raise click.UsageError("give the folder for the repaired copy with -o OUT, or ask with --dry-run")
    with on_terminal(given["quiet"]) as told:
        kept = None if dry_run or show_diff else out
        report = api.re_export(path, kept, force=force, **_asked(given, told))
    finish(report, given, show_diff=show_diff)


@cli.command()
@click.argument("path", type=click.Path())
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder for the reproducer; must not exist.")
@click.option("--force", is_flag=True, help="Replace DIR if kvdoctor wrote it.")
@shared_options
@run_options
def repro(path: str, out: str, force: bool, **given: Any) -> NoReturn:
    """Write the smallest weight-free model and script that show the failure, to send to others.

    The first finding at or above --fail-on that a run shows is taken. Exit code 0: nothing to reproduce, and no
    folder. 1: the model has the finding, and DIR shows it. 2: wrong usage. 3: the failure could not be shown without
    the weights, or the model could not be diagnosed; nothing was written.
    """
    from kvdoctor import reproducing

    finish(reproducing.repro(reproducing.Request(path, out, force), _options(given)), given)


@cli.command()
@click.argument("paths", nargs=-1, type=click.Path())
@click.option("--static", is_flag=True, help="Run nothing: what the files alone say. The verdict is never healthy.")
@click.option("--by-folder", is_flag=True, help="A file stands for the export that it lies in, and each is asked once.")
@baseline_option
@target_options
@offline_option
@shared_options
@run_options
@policy_options
@gate_options
def gate(paths: tuple[str, ...], **given: Any) -> NoReturn:
    """Inspect and step-test models for CI, those of the policy where no PATH is given (docs/policy.md).

    Exit code 0 healthy, 1 findings that are not known, 2 wrong usage, 3 could not be checked.
    """
    import gc

    from kvdoctor import gating
    from kvdoctor.progress import on_terminal

    gc.disable()  # this process lives for one gate, and the models are run in others
    cli_output.outputs(given, models=models_of(paths))  # refused before any work is done
    known = baseline_of(given)
    with on_terminal(given["quiet"]) as told:
        jobs = jobs_of(paths, given, told)
        how = how_given(ruled(None, given), told)
        done = gating.gate(jobs, how, static=given["static"], baseline=known)
    done = replace(done, policy=policy_of().file)
    cli_output.show_gate(done, given)
    _exit(done.exit_code)


cli.add_command(config)
cli.add_command(baseline)
cli.add_command(diff)


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
        hint = f"; did you mean {close[0]}?" if close else ";"
        raise click.UsageError(f"there is no check {code!r}{hint} `kvdoctor explain` lists all of them")
    text = found.documentation
    if sys.stdout.isatty():
        width = min(shutil.get_terminal_size().columns, 120)
        paragraphs = (textwrap.fill(part, width, break_on_hyphens=False) for part in text.split("\n\n"))
        text = "\n\n".join(paragraphs)
    click.echo(f"{found.code} {found.name}\n\n{text}")


@cli.command()
@click.argument("name", type=click.Choice(["report", "gate", "contract", "diff", "baseline"]))
def schema(name: str) -> None:
    """Print the JSON Schema of a document."""
    from kvdoctor.report import machine
    from kvdoctor.report.schema import schemas

    click.echo(machine.dump(schemas()[name]), nl=False)


@cli.command()
@click.argument("path", type=click.Path())
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text")
def contract(path: str, format_: str) -> None:
    """Print the cache contract of each stack: what a loop must feed, feed back and hold."""
    from kvdoctor import doctor
    from kvdoctor.findings import Selection
    from kvdoctor.options import Options
    from kvdoctor.report import formats, machine, text
    from kvdoctor.report.safe import printable, shortened

    report = doctor.inspect(path, Options(selection=Selection(("unreadable",))))  # no finding is told here but why not
    if format_ == "json":
        sys.stdout.write(machine.render_contracts(report))
    else:
        text.render_contracts(report, formats.console("auto"))
    if not report.stacks:
        reasons = [finding.observed for finding in report.findings] + [entry.reason for entry in report.not_checked]
        _complain(f"no cache contract: {printable(shortened('; '.join(reasons), 1200))}")
    _exit(EXIT_OK if report.stacks else 3)


@cli.command()
def env() -> None:
    """Versions, execution providers and extras, each with the command that mends it."""
    from kvdoctor import environment

    for line in environment.lines():
        click.echo(line)


cli_examples.show(cli)


def _asked(given: dict[str, Any], told: "Told | None" = None) -> dict[str, Any]:
    """What the command line was given, as the keyword arguments of `kvdoctor.api`."""
    cli_output.outputs(given)  # refused before any work is done
    return {**asked_of_a_model(given), "progress": told}


def _options(given: dict[str, Any], told: "Told | None" = None) -> "Options":
    from kvdoctor.asking import options_of

    return options_of(_asked(given, told))


def finish(report: "Report", given: dict[str, Any], **more: Any) -> NoReturn:
    """Print a report in the format asked for, write the files asked for, and exit by its verdict."""
    from kvdoctor.report.document import exit_code

    cli_output.show(report, given, **more)
    _exit(exit_code(report, given["fail_on"]))


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    raise SystemExit(code)


def main() -> NoReturn:
    """Run the command line. Errors that kvdoctor raises on purpose end with exit code 2 and one line."""
    try:
        _prepare_streams()
        _show_notices()
        _end_in_order()
        cli.main(standalone_mode=False)
        _exit(EXIT_OK)
    except click.ClickException as error:
        _tell(error)
        raise SystemExit(2) from None
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        # Where the interrupt met an `exec`, as dataclasses use it, Python would end by the signal although it was
        # caught here (CPython, exit_sigint). All that had to be cleaned up has been on the way to this line.
        os._exit(EXIT_INTERRUPTED)
    except KvdoctorError as error:
        from kvdoctor.report.safe import printable, shortened

        _complain(printable(shortened(str(error), 1200)))
        raise SystemExit(2) from None
    except BrokenPipeError:
        # The reader of our output has gone: nothing more to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except OSError as error:
        _complain(f"the report could not be written: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(2) from None


def _tell(error: click.ClickException) -> None:
    """Show what is wrong with a command line, which may hold the names of files that others gave them."""
    from kvdoctor.report.safe import printable, shortened

    if isinstance(error, click.UsageError) and error.ctx is not None and error.message == error.ctx.get_help():
        click.echo(error.message, err=True)  # a command that was given nothing shows its help
        return
    message = error.format_message()
    if isinstance(error, click.MissingParameter) or printable(message) == message:
        error.show()
    else:
        _complain(printable(shortened(message, 1200)))


def _end_in_order() -> None:
    """Let a request to end (`timeout`, a runner that cancels, a closed terminal) take down what was begun."""

    def end(number: int, _frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _prepare_streams() -> None:
    """Make sure that there is somewhere to write to, and that no character can be refused there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")


def _show_notices() -> None:
    """Say on a terminal what takes long outside of experiments: an environment that is being made."""
    if sys.stderr.isatty():
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("kvdoctor: %(message)s"))
        logging.getLogger("kvdoctor").addHandler(handler)
        logging.getLogger("kvdoctor").setLevel(logging.INFO)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(f"kvdoctor: {text}", err=True)
