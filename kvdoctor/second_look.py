"""The same experiments on a twin that does not round: what is left there is a fault, what is gone was rounding."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvdoctor.case import Case
from kvdoctor.child import MIB, Limits
from kvdoctor.contract import CacheContract
from kvdoctor.findings import NotChecked
from kvdoctor.runtimes import Examined, Job, Runtime
from kvdoctor.trace import Run, Unrounded
from kvdoctor.twins import SETTINGS, NoTwin, Twin, unrounded_bytes, write_twin

ALWAYS = 256 * MIB
"""Bytes of float32 weights up to which every model that rounds has its second look: that costs a second or two."""
WHEN_UNCLEAR = 2048 * MIB
"""Bytes up to which it has one where its own runs leave something open; beyond, only on request."""

UNCLEAR = ("ambiguous", "differs", "inconclusive")
PRESENT_ONCE = 2
"""A session holds its weights as they are stored and widened while it opens them."""


@dataclass(frozen=True)
class Look:
    """What a second look brought: the case with its runs, and why there was none or what it leaves open."""

    case: Case
    notes: tuple[NotChecked, ...] = ()
    examined: Examined = field(default_factory=Examined)


def second_look(case: Case, runtime: Runtime, limits: Limits, job: Job, thorough: bool = False) -> Look:
    """Run the judged experiments of a stack on its twin, if it rounds and that is worth its price.

    `job` is the one that was carried out on the stack itself. `thorough` asks for it whatever the size.
    """
    contract, stack = case.contract, case.stack
    names = tuple(name for name in _asked(case) if name in job.experiments)
    if contract is None or stack is None or contract.exactness == "float" or not names:
        return Look(case)
    unclear = any(run.outcome in UNCLEAR for run in case.runs if run.experiment in names)
    if reason := _too_large(case, limits, unclear, thorough):
        return Look(case, _note(case, reason) if unclear else ())
    with tempfile.TemporaryDirectory(prefix="kvdoctor-") as folder:
        try:
            twin = write_twin(case.folder.files, contract, Path(folder))
        except NoTwin as error:
            return Look(case, _note(case, f"without rounding it could not be run: {error}") if unclear else ())
        return _taken(case, runtime.examine(_twin_job(job, twin, names)), contract)


def _asked(case: Case) -> Iterator[str]:
    """The experiments to repeat: those that findings rest on and that ran through, and the search for causes."""
    from kvdoctor.experiments import load

    done = {run.experiment: run.outcome for run in case.runs}
    if case.judged is None or case.judged.outcome not in ("passed", *UNCLEAR):
        return  # what stops without rounding taken away stops with it as well
    for experiment in load():
        outcome = done.get(experiment.name, "died")
        repeated = experiment.judged and experiment.name not in WHATEVER_IT_ROUNDS
        if (repeated or experiment.asks_why) and outcome not in ("failed", "died"):
            yield experiment.name


WHATEVER_IT_ROUNDS = {"same-feed", "dummy-past-runs"}
"""Experiments that a twin has nothing to say to: they hold a graph against itself, or ask whether it runs at all."""


def _too_large(case: Case, limits: Limits, unclear: bool, thorough: bool) -> str | None:
    assert case.contract is not None  # noqa: S101 - asked only where there is one
    used = {graph.file for graph in case.contract.graphs.values()}
    size = unrounded_bytes(file for file in case.folder.files if file.name in used)
    if PRESENT_ONCE * size > limits.memory_limit():
        return f"without rounding it would take more than {size // MIB} MiB, too much for the memory limit"
    most = ALWAYS if not unclear else WHEN_UNCLEAR
    if size > most and not thorough:
        return f"without rounding it would take {size // MIB} MiB, which is only done on request"
    return None


def _twin_job(job: Job, twin: Twin, names: tuple[str, ...]) -> Job:
    return replace(
        job,
        folder=twin.folder,
        contract=twin.contract,
        experiments=names,
        keep_logits=None,
        keep_calls=None,
        trace=None,
        settings=SETTINGS,
        timed=False,
    )


def _taken(case: Case, examined: Examined, contract: CacheContract) -> Look:
    """What the twin's runs say of the model's own."""
    found = {run.experiment: run for run in examined.runs}
    broken = [run for run in found.values() if run.outcome in ("failed", "died")]
    refused = [refusal.file for refusal in examined.refusals if refusal.opens_at is None]
    if broken or refused or examined.crashes or examined.obstacles:
        # A graph that runs and whose twin does not is one that was not understood: nothing is concluded from it.
        what = [*(run.error or run.reason or run.outcome for run in broken), *refused, *examined.crashes]
        reason = f"without rounding it does not run, so nothing was concluded from that ({' '.join(what)[:300]})"
        return Look(case, _note(case, reason), examined)
    decided = found.get("plain-loop") or found.get("held-loop")
    if decided is None or contract.exactness == "float":
        return Look(case, (), examined)
    return Look(replace(case, runs=tuple(_with(run, found.get(run.experiment)) for run in case.runs)), (), examined)


def _with(run: Run, twin: Run | None) -> Run:
    """A run with what the same experiment shows without rounding, which decides where it is clear."""
    if twin is None:
        return run
    if _seeks_cause(run.experiment):
        return replace(twin, steps=run.steps, unrounded=_told(run, twin))
    if twin.outcome == "skipped":
        return run
    if twin.outcome == "differs":
        told = replace(run, cause=twin.cause, growth=twin.growth, unrounded=_told(run, twin))
        return told if run.outcome == "differs" else replace(told, outcome="differs", failed_step=twin.failed_step)
    # A cause that is seen only among what was rounded is none.
    return replace(run, cause=None, unrounded=_told(run, twin))


def _seeks_cause(name: str) -> bool:
    from kvdoctor.experiments import load

    return any(experiment.name == name and experiment.asks_why for experiment in load())


def _told(run: Run, twin: Run) -> Unrounded:
    found = tuple(step.difference.relative for step in twin.steps if step.difference is not None)
    return Unrounded(twin.outcome, found, twin.failed_step, twin.reason, own=run.outcome)


def _note(case: Case, reason: str) -> tuple[NotChecked, ...]:
    return (NotChecked(case.stack.name if case.stack else None, "KV301", reason),)
