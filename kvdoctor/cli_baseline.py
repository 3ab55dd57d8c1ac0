"""`kvdoctor baseline`: writes and prunes what a gate knows."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdoctor.cli_gate import baseline_file, jobs_of
from kvdoctor.cli_options import offline_option, run_options, shared_options, target_options
from kvdoctor.cli_policy import policy_options, ruled
from kvdoctor.cli_running import gate_options, how_given

if TYPE_CHECKING:
    from kvdoctor.baseline import Baseline
    from kvdoctor.gating.recording import Recorded, Wish


@click.command()
@click.argument("paths", nargs=-1)
@click.option("-o", "--out", metavar="FILE", help="The baseline. [default: the policy's, else kvdoctor-baseline.json]")
@click.option("--reason", metavar="TEXT", help="Take in what counts and is not known, for this reason.")
@click.option("--until", metavar="DATE", help="With --reason: the last day on which it is known, as in 2026-12-31.")
@click.option("--prune", is_flag=True, help="Take out what is not found any more, and models that are gone.")
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if something would be written or still counts.")
@target_options
@offline_option
@shared_options
@run_options
@policy_options
@gate_options
def baseline(paths: tuple[str, ...], out: str | None, check: bool, **given: Any) -> None:
    """Run the gate, and write what it found into its baseline: the findings that a team lives with.

    Reasons and days of what is known stay as they are. Exit code 0: done, or up to date. 1: with --check, not up to
    date. 2: wrong usage. 3: something could not be checked; what could be is written.
    """
    from kvdoctor import gating
    from kvdoctor.baseline import USUAL_NAME, document, today
    from kvdoctor.gating.knowing import compared
    from kvdoctor.gating.recording import recorded
    from kvdoctor.out_folder import write_whole
    from kvdoctor.progress import on_terminal

    wish = _wish(given, check)
    known = _baseline(out or baseline_file({}) or USUAL_NAME)
    with on_terminal(given["quiet"]) as told:
        done = gating.gate(jobs_of(paths, given, told), how_given(ruled(None, given), told))
    found = recorded(known, compared(known, done.reports, today()), wish)
    changed = found.entries != known.entries
    if changed and not check:
        write_whole(Path(known.file), document(found.entries))
    _tell(found, known.file, "would be" if check else "was", len(found.entries), changed)
    _leave(found, check, changed)


def _wish(given: dict[str, Any], check: bool) -> "Wish":
    """What is asked for, taken out of what was given; refused before any work is done."""
    from kvdoctor.baseline import is_day
    from kvdoctor.gating.recording import Wish

    reason, until, prune = given.pop("reason"), given.pop("until"), given.pop("prune")
    if not (reason or prune or check):
        raise click.UsageError(
            "say what is to be done: --reason TEXT takes in what counts, --prune takes out what is not found any more, "
            "--check writes nothing"
        )
    if reason is not None and not reason.strip():
        raise click.UsageError("--reason takes the reason why the findings may stay; it is empty")
    if until is not None:
        _refuse_day(until, is_day(until), reason)
    return Wish(reason, until, prune)


def _refuse_day(until: str, is_one: bool, reason: str | None) -> None:
    from kvdoctor.baseline import today

    if not is_one:
        raise click.UsageError(f"--until takes a day, as in 2026-12-31; got {until!r}")
    if reason is None:
        raise click.UsageError("--until goes with --reason TEXT; the days of what is known are changed in the file")
    if until < today().isoformat():
        raise click.UsageError(f"--until {until} is over already; give a day to come")


def _baseline(file: str) -> "Baseline":
    """The baseline as it is; an empty one where there is none yet."""
    import os

    from kvdoctor.baseline import Baseline, read_baseline

    if os.path.lexists(file):
        return read_baseline(file)
    if not Path(file).absolute().parent.is_dir():
        raise click.UsageError(f"the folder of {file!r} does not exist; make it first")
    return Baseline(file)


def _tell(found: "Recorded", file: str, verb: str, count: int, changed: bool) -> None:
    from kvdoctor.report.safe import printable, shortened

    for line in (*found.changes, *found.left):
        click.echo(printable(shortened(line, 600)))
    for path in found.open:
        click.echo(printable(shortened(f"not checked: {path}: `kvdoctor gate` says what could not be", 600)), err=True)
    entries = f"{count} entr{'y' if count == 1 else 'ies'}"
    click.echo(printable(f"{file}: {f'{verb} written, ' if changed else 'up to date, '}{entries}"))


def _leave(found: "Recorded", check: bool, changed: bool) -> None:
    code = 1 if check and (changed or found.left) else 3 if found.open else 0
    if code:
        raise SystemExit(code)
