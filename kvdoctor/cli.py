"""The command line: parse, call, print, exit code. Nothing is diagnosed here.

Only click is imported at the top: `--help` and `--version` load neither onnx nor numpy nor rich.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor import __version__
from kvdoctor.cli_options import (
    FORMATS,
    afresh_options,
    load_options,
    offline_option,
    run_options,
    shared_options,
    target_options,
)
from kvdoctor.cli_running import from_cache, gate_options, how_given
from kvdoctor.errors import KvdoctorError

if TYPE_CHECKING:
    from kvdoctor.options import Options
    from kvdoctor.progress import Told
    from kvdoctor.report.document import Report
    from kvdoctor.uses import Required

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
@click.argument("path")
@load_options
@target_options
@shared_options
def inspect(path: str, **given: Any) -> NoReturn:
    """Read a model without running it: files, inputs and outputs, the cache contract. Loads no weights."""
    from kvdoctor import doctor

    finish(doctor.inspect(path, _options(given)), given)


@cli.command("step-test")
@click.argument("path")
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
def step_test(path: str, **given: Any) -> NoReturn:
    """Run decode steps with and without the cache, name the failure and its cause."""
    finish(_step_test(path, given), given)


@cli.command("re-export")
@click.argument("path", required=False)
@click.option("-o", "--out", required=False, metavar="OUT", help="Folder for the repaired copy; must not exist.")
@click.option("--force", is_flag=True, help="Replace OUT if kvdoctor wrote it.")
@click.option("--dry-run", is_flag=True, help="Say what would be changed, write nothing.")
@click.option("--diff", "show_diff", is_flag=True, help="Show the change node by node, write nothing.")
@click.option("--fix", multiple=True, metavar="NAMES", help="Only these repairs, by name (docs/repairs.md).")
@click.option("--keep-unproved", is_flag=True, help="Write OUT although the repair could not be proved.")
@click.option(
    "--layout", metavar="NAME", help="Another layout: merged, pair, optimum, optimum-pair, single (docs/layouts.md)."
)
@click.option("--axes", type=click.Choice(["kept", "readable"]), default="kept", help="Names of open axes.")
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
    from kvdoctor.cure.converting import Fit
    from kvdoctor.progress import on_terminal

    if out is None and not (dry_run or show_diff):
        raise click.UsageError("give the folder for the repaired copy with -o OUT, or ask with --dry-run")
    fix = tuple(dict.fromkeys(name.strip() for entry in given["fix"] for name in entry.split(",") if name.strip()))
    if given["fix"] and not fix:
        raise click.UsageError("--fix names no repair; leave it out to have all of them (docs/repairs.md)")
    plan: dict[str, Any] = {"path": path, "out": None if dry_run or show_diff else out, "force": force, "fix": fix}
    plan["keep_unproved"] = given["keep_unproved"]
    lowered = given["opset"] if given["from_"] is None else None
    plan["fit"] = Fit(given["layout"], given["axes"] == "readable", given["ir_version"], lowered)
    with on_terminal(given["quiet"]) as told:
        report = (_repaired if given["from_"] is None else _exported_afresh)(plan, given, told)
    finish(report, given, show_diff=show_diff)


@cli.command()
@click.argument("path")
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
@click.argument("paths", nargs=-1, required=True)
@target_options
@offline_option
@shared_options
@run_options
@gate_options
def gate(paths: tuple[str, ...], **given: Any) -> NoReturn:
    """Inspect and step-test models for CI. Exit code 0 healthy, 1 findings, 2 wrong usage, 3 could not be checked."""
    from kvdoctor import gating
    from kvdoctor.progress import on_terminal
    from kvdoctor.report import formats

    outputs = _outputs(given)
    with on_terminal(given["quiet"]) as told:
        options = _options(given, told)
        done = gating.gate([gating.Job(path, options) for path in paths], how_given(given, told))
    if given["format_"] == "text":
        for report in done.reports:
            _print(report, given)
        if len(done.reports) > 1:
            healthy = sum(report.verdict == "healthy" for report in done.reports)
            click.echo(
                f"gate: {done.verdict}; {healthy} of {len(done.reports)} models healthy{from_cache(done.reports)}"
            )
    else:
        sys.stdout.write(formats.rendered_gate(done.verdict, list(done.reports), given["format_"]))
    for name, file in outputs:
        _write(file, formats.rendered_gate(done.verdict, list(done.reports), name))
    _exit(done.exit_code)


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
@click.argument("name", type=click.Choice(["report", "gate", "contract"]))
def schema(name: str) -> None:
    """Print the JSON Schema of a document."""
    from kvdoctor.report import machine
    from kvdoctor.report.schema import schemas

    click.echo(machine.dump(schemas()[name]), nl=False)


@cli.command()
@click.argument("path")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text")
def contract(path: str, format_: str) -> None:
    """Print the cache contract of each stack: what a loop must feed, feed back and hold."""
    from kvdoctor import doctor
    from kvdoctor.report import formats, machine, text
    from kvdoctor.report.safe import printable, shortened

    report = doctor.inspect(path)
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


def _repaired(plan: dict[str, Any], given: dict[str, Any], told: "Told | None") -> "Report":
    from kvdoctor import re_exporting

    if plan["path"] is None:
        raise click.UsageError("give PATH, the model to repair; or --from CHECKPOINT to export one afresh")
    for name in ("exporter", "dtype", "task", "because"):
        if given[name] is not None:
            raise click.UsageError(f"--{name} is for an export made afresh: give --from CHECKPOINT as well")
    return re_exporting.re_export(re_exporting.Request(**plan), _options(given, told))


def _exported_afresh(plan: dict[str, Any], given: dict[str, Any], told: "Told | None") -> "Report":
    from kvdoctor import exporting_afresh
    from kvdoctor.afresh.asked import Asked

    how = {name: given[name] for name in ("exporter", "opset", "dtype", "task", "because")}
    asked = Asked(given["from_"], **plan, **how)
    return exporting_afresh.export_afresh(asked, _options(given, told), told.say if told is not None else None)


def _step_test(path: str, given: dict[str, Any]) -> "Report":
    from kvdoctor.child import Limits
    from kvdoctor.progress import on_terminal
    from kvdoctor.runtimes import Runtime

    # Started before anything else is loaded: the worker opens the runtime in the meantime.
    with Runtime(Limits(given["timeout"], given["max_memory"])) as runtime, on_terminal(given["quiet"]) as told:
        from kvdoctor import doctor

        return doctor.step_test(path, _options(given, told), runtime)


def _options(given: dict[str, Any], told: "Told | None" = None) -> "Options":
    from kvdoctor.child import Limits
    from kvdoctor.findings import Selection
    from kvdoctor.kept import Load
    from kvdoctor.options import Options
    from kvdoctor.targets import parse_targets

    _outputs(given)

    return Options(
        consumer=given["consumer"],
        fail_on=given["fail_on"],
        selection=Selection(_codes(given["select"]), _codes(given["ignore"])),
        seed=given["seed"],
        provider=given.get("provider", "CPUExecutionProvider"),
        limits=Limits(given.get("timeout", 300.0), given.get("max_memory")),
        hash_files=given["hash_files"],
        contract=given.get("contract"),
        required=_uses(given["require"]),
        thorough=given.get("thorough", False),
        prompt=_ids(given.get("prompt_ids", "")),
        inputs=given.get("inputs"),
        progress=told,
        reference=given.get("reference"),
        offline=given.get("offline", False),
        trace=given.get("trace"),
        targets=parse_targets(given.get("targets", ())),
        load=Load(given.get("batch"), given.get("context"), given.get("encoder_length")),
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


def _uses(given: tuple[str, ...]) -> "tuple[Required, ...]":
    """Split `batch,beam`, and refuse what is no use."""
    from kvdoctor.uses import REQUIRED

    words = dict.fromkeys(word.strip() for entry in given for word in entry.split(",") if word.strip())
    for word in words:
        if word not in REQUIRED:
            raise click.UsageError(f"--require takes {', '.join(REQUIRED)}; got {word!r}")
    return tuple(use for use in REQUIRED if use in words)


def _ids(given: str) -> tuple[int, ...]:
    """Split `1,2,3`."""
    try:
        return tuple(int(word) for word in given.split(",") if word.strip())
    except ValueError:
        raise click.UsageError(f"--prompt-ids takes whole numbers, as in 1,2,3; got {given!r}") from None


def finish(report: "Report", given: dict[str, Any], **more: Any) -> NoReturn:
    """Print a report in the format asked for, write the files asked for, and exit by its verdict."""
    from kvdoctor.report.document import exit_code

    _print(report, given, **more)
    for name, file in _outputs(given):
        from kvdoctor.report import formats

        _write(file, formats.rendered(report, name))
    _exit(exit_code(report, given["fail_on"]))


def _print(report: "Report", given: dict[str, Any], **more: Any) -> None:
    if given["format_"] == "json":
        from kvdoctor.report import machine

        sys.stdout.write(machine.render(report))
        return
    from kvdoctor.report import formats, text

    if given["format_"] != "text":
        sys.stdout.write(formats.rendered(report, given["format_"]))
        return
    verbosity = -1 if given["quiet"] else 1 if given["verbose"] else 0
    text.render(report, formats.console(given["color"]), verbosity, **more)


def _outputs(given: dict[str, Any]) -> list[tuple[str, Path]]:
    """The files asked for with `--output`, refused before any work is done."""
    targets = []
    for target in given["outputs"]:
        name, _, file = target.partition("=")
        if name not in FORMATS or not file:
            raise click.UsageError(f"--output takes FORMAT=FILE with a format of {', '.join(FORMATS)}; got {target!r}")
        if not Path(file).parent.is_dir():
            raise click.UsageError(f"the folder of {file!r} does not exist; make it first")
        targets.append((name, Path(file)))
    return targets


def _write(file: Path, content: str) -> None:
    from kvdoctor.out_folder import write_whole

    write_whole(file, content)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    raise SystemExit(code)


def main() -> NoReturn:
    """Run the command line. Errors that kvdoctor raises on purpose end with exit code 2 and one line."""
    try:
        _prepare_streams()
        _end_in_order()
        cli.main(standalone_mode=False)
        _exit(EXIT_OK)
    except click.ClickException as error:
        error.show()
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


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(f"kvdoctor: {text}", err=True)
