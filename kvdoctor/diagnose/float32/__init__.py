"""The float32 copy of a stack, and the runs on it: a difference that remains is a fault, one that vanishes is rounding.

Where a graph computes in float16, or rounds its operands to 8 bits, a cached step and the whole sequence in one call
rightly differ, and a fault may hide in that difference. The copy has the same nodes, weights and cache, computed in
float32 without rounding: there right splits differ by 1e-6, so the same experiments are run on it again. Weights stay
as they are stored and are widened when the file is opened, so that a copy costs the size of its file on disk. It is
written to a private folder; user files are only read.
"""

import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import TypeVar

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import DECODING, CacheContract, Port, Slot
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import OWN_SESSION, SEARCH, Float32Result, Run
from kvdoctor.decode.tolerances import MOST_BY_ROUNDING, MOST_OF_CONTROL
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.float32.rounding import unround_integers, unround_presents, unround_scales
from kvdoctor.diagnose.float32.widen import widen
from kvdoctor.errors import CannotCheck
from kvdoctor.findings import NotChecked
from kvdoctor.model.external_data import ExternalFile
from kvdoctor.model.output_folder import copy_whole
from kvdoctor.model.precision import exactness_of
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.view import ELEMENT_TYPES, GraphView
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime, StackResults
from kvdoctor.runtime.process import MIB
from kvdoctor.runtime.scratch import scratch_folder

SETTINGS = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""Keeps ONNX Runtime from rounding where the graph does not: MatMulNBits nodes that it fuses itself compute in float32.
Source: onnxruntime_session_options_config_keys.h; a version that does not know the key ignores it."""
WIDE, WIDENED = 4, {"float16", "bfloat16", "int8", "uint8", "float"}
"""Bytes of an element of float32, and the types of weights that become float32."""
FLOAT16 = {"float16", "bfloat16"}
Typed = TypeVar("Typed", Port, Slot)
ALWAYS = 256 * MIB
"""Bytes of float32 weights up to which every model that rounds is run again: that takes a second or two."""
WHEN_UNCLEAR = 2048 * MIB
"""Bytes up to which it is run again if its own runs leave something open; beyond, only with --thorough."""
UNCLEAR = ("ambiguous", "differs", "inconclusive")
PRESENT_ONCE = 2
"""A session holds its weights as they are stored and widened while it opens them."""
INDEPENDENT_OF_ROUNDING = {"same-feed", "dummy-past-runs", "encoder-rows", OWN_SESSION, SEARCH}
"""Experiments that compare a graph with itself or with an operator that has no copy, ask whether it runs, or count: a
float32 copy adds nothing."""


def unrounded_bytes(files: Iterable[OnnxFile]) -> int:
    """Bytes that the weights of some files take in float32."""
    scopes = (scope for file in files if file.view for scope in file.view.scopes())
    tensors = (tensor for scope in scopes for tensor in scope.graph.initializer)
    return sum(WIDE * math.prod(one.dims) for one in tensors if ELEMENT_TYPES.get(one.data_type) in WIDENED)


def write_float32_copy(files: Iterable[OnnxFile], contract: CacheContract, target: Path) -> CacheContract:
    """Write the copy of a stack into an empty folder, and give its contract; raises `CannotCheck` with the reason."""
    wanted = {file: name for name, graph in contract.graphs.items() for file in graph.files}
    chosen = [file for file in files if file.name in wanted]
    decoding = {contract.phases[phase].graph for phase in DECODING}
    views = []
    try:
        sizes = [file.path.stat().st_size for file in chosen]
        demand_room(sizes, (external for file in chosen for external in file.external), target)
        for file in chosen:
            model = _unround(file, contract)
            place = target / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(model.SerializeToString())
            for external in file.external:
                if not (copied := place.parent / external.location).exists():
                    copy_whole(external.path, copied)
            if wanted[file.name] in decoding:
                views.append((wanted[file.name] == contract.phases["decode"].graph, GraphView(model)))
    except OSError as error:
        raise CannotCheck(f"it cannot be written: {error.strerror or error}") from None
    widened = _widen_contract(contract)
    views.sort(key=lambda pair: not pair[0])
    exactness = exactness_of([view for _, view in views], widened.slots, without_rounding=True)
    if exactness != "float":
        raise CannotCheck(f"it would still round ({exactness})")
    return replace(widened, exactness=exactness)


def _unround(file: OnnxFile, contract: CacheContract) -> ModelProto:
    """The model of a file without its rounding; external weights are not read."""
    model = ModelProto()
    model.ParseFromString(file.path.read_bytes())
    unround_presents(model, contract)
    widen(model)
    unround_integers(model)
    unround_scales(model)
    return model


def demand_room(sizes: Iterable[int], external: Iterable[ExternalFile], target: Path) -> None:
    """Raise `CannotCheck` where there is no room for files of these sizes and for external data, each file once."""
    size = sum(sizes) + sum({one.path: one.bytes or 0 for one in external}.values())
    if size * 1.1 > shutil.disk_usage(target).free:
        raise CannotCheck(f"{target.parent} has no room for a copy of {size >> 20} MiB")


def _widen_contract(contract: CacheContract) -> CacheContract:
    """The contract with float32 where the graphs had fewer bits."""

    def widened(one: Typed) -> Typed:
        return replace(one, dtype="float") if one.dtype in FLOAT16 else one

    return replace(contract.with_ports(widened), slots=tuple(map(widened, contract.slots)))


@record(slots=False)
class Float32Rerun:
    """The runs of a stack with what the rerun adds to them, what it leaves open, and what was measured."""

    runs: tuple[Run, ...]
    not_checked: tuple[NotChecked, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0


def rerun_in_float32(context: ContractContext, job: ExperimentJob, options: Options, runtime: Runtime) -> Float32Rerun:
    """Repeat the judged experiments of `job` on the float32 copy of a stack, if it rounds and that is worth it."""
    runs, contract = context.runs, context.contract
    names = tuple(name for name in _select_experiments(context) if name in job.experiments)
    unclear = any(run.outcome in UNCLEAR for run in runs if run.experiment in names)
    if not names or (contract.exactness == "float" and not (unclear and context.rounded_presents)):
        return Float32Rerun(runs)
    reason = _refuse_size(context, options, unclear)
    with scratch_folder() as folder:
        try:
            copy = write_float32_copy(context.folder.files, contract, Path(folder)) if reason is None else contract
        except CannotCheck as error:
            reason = f"there is no float32 copy: {error}"
        if reason is not None:
            return Float32Rerun(runs, _note(context, reason) if unclear else ())
        again = replace(job, folder=Path(folder), contract=copy, experiments=names, scratch=Path(folder), added=())
        again = replace(again, keep_logits=None, keep_calls=None, keep_step=None, settings=SETTINGS, timed=False)
        results = runtime.examine(again, options.progress)
    merged, notes = _merge_all(context, results)
    return Float32Rerun(merged, notes, results.seconds, results.peak_bytes)


def _select_experiments(context: ContractContext) -> Iterator[str]:
    """The experiments to repeat: those that findings rest on and that ran through, and the search for causes."""
    from kvdoctor.decode.experiments import load

    done = {run.experiment: run.outcome for run in context.runs}
    loop = context.checked_loop
    if loop is None or loop.outcome not in ("passed", *UNCLEAR):
        return  # a loop that fails also fails in float32
    for experiment in load():
        outcome = done.get(experiment.name, "died")
        repeated = experiment.judged and experiment.name not in INDEPENDENT_OF_ROUNDING
        if (repeated or experiment.explains) and outcome not in ("failed", "died"):
            yield experiment.name


def _refuse_size(context: ContractContext, options: Options, unclear: bool) -> str | None:
    """Why the copy is too large to be run, or None."""
    used = {file for graph in context.contract.graphs.values() for file in graph.files}
    size = unrounded_bytes(file for file in context.folder.files if file.name in used)
    if PRESENT_ONCE * size > options.limits.memory_limit():
        return f"its float32 copy takes {size // MIB} MiB, too much for the memory limit"
    most = ALWAYS if not unclear else WHEN_UNCLEAR
    if size > most and not options.thorough:
        return f"its float32 copy takes {size // MIB} MiB, and is only run with --thorough"
    return None


def _merge_all(context: ContractContext, results: StackResults) -> tuple[tuple[Run, ...], tuple[NotChecked, ...]]:
    """The model's own runs with what those of the copy say of them; and why nothing was concluded, if so."""
    found = {run.experiment: run for run in results.runs}
    broken = [run for run in found.values() if run.outcome in ("failed", "died")]
    refused = [refusal.file for refusal in results.refusals if refusal.opens_at is None]
    if broken or refused or results.crashes or results.reasons_not_run:
        # A graph that runs and whose copy does not is one that was not understood: nothing is concluded from it.
        what = [*(run.error or run.reason or run.outcome for run in broken), *refused, *results.crashes]
        reason = f"its float32 copy does not run, so nothing was concluded from it ({' '.join(what)[:300]})"
        return context.runs, _note(context, reason)
    if "plain-loop" not in found and "held-loop" not in found:
        return context.runs, ()
    limit = find_rounding_limit(context) if context.rounded_presents else math.inf
    return tuple(merge_results(run, found.get(run.experiment), limit) for run in context.runs), ()


def find_rounding_limit(context: ContractContext) -> float:
    """How far the logits of a step may be off by the rounding of the cache, in standard deviations.

    The attention of a call without a cache does not use what the graph rounds on its way out, so that the difference is
    the error which the rounding makes. The logits are wrong beyond the loosest limit of any arithmetic, or where half
    of what a corrupted cache does is reached: of a kind that is rounded, and that changes the logits visibly. What
    passes by the model's own tolerance is never too coarse.
    """
    loop, rounded = context.checked_loop, context.rounded_presents
    kinds = tuple(f"{slot.kind} " for slot in context.contract.slots if slot.present in rounded)
    corrupted = [one for one in loop.controls if one.visible and one.corrupted.startswith(kinds)] if loop else []
    effects = [one.difference.relative for one in corrupted if one.difference is not None]
    return max(context.tolerance.passes, min([MOST_BY_ROUNDING, *(MOST_OF_CONTROL * effect for effect in effects)]))


def merge_results(run: Run, copy: Run | None, limit: float) -> Run:
    """A run with the result of its float32 copy, which decides if clear; `limit` is what rounding may do to logits."""
    from kvdoctor.decode.experiments import by_name

    if copy is None:
        return run
    if (experiment := by_name().get(run.experiment)) is not None and experiment.explains:
        return replace(copy, steps=run.steps, unrounded=_summarize(run, copy))
    if copy.outcome == "skipped":
        return run
    if copy.outcome == "differs":
        merged = replace(run, cause=copy.cause, unrounded=_summarize(run, copy))
        return merged if run.outcome == "differs" else replace(merged, outcome="differs", failed_step=copy.failed_step)
    # At least every second step on a cache is beyond the limit; one alone may be a coincidence.
    cached = [step for step in run.steps if step.phase == "decode" and step.difference is not None]
    beyond = [step.step for step in cached if step.difference and not step.difference.relative <= limit]
    if copy.outcome == "passed" and beyond and 2 * len(beyond) >= len(cached):
        coarse = replace(_summarize(run, copy), too_coarse=True)
        return replace(run, outcome="differs", failed_step=beyond[0], cause=None, unrounded=coarse)
    # A cause that only the rounded model shows is none.
    return replace(run, cause=None, unrounded=_summarize(run, copy))


def _summarize(run: Run, copy: Run) -> Float32Result:
    found = tuple(step.difference.relative for step in copy.steps if step.difference is not None)
    return Float32Result(copy.outcome, found, copy.failed_step, copy.reason, own=run.outcome)


def _note(context: ContractContext, reason: str) -> tuple[NotChecked, ...]:
    return (NotChecked(context.stack.name, "KV301", reason),)
