"""Gives a decoder without a cache one that grows: keys and values are carried, and a call takes new tokens alone.

Requires: token ids in, logits out, one graph for any number of tokens, causal attentions as the only nodes that mix
positions; opset 11. Ensures: `past_key_values.N.key` and `.value`, float[batch, kv_heads, past, head_dim], and presents
of past + new rows; masks as long as both, positions from the past on, and logits of the new tokens. What the encoder
of a decoder gives is taken in each call as before.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdoctor.addons.conversions.graphs.cache_axes import Inputs, Labels, read_inputs, read_sizes
from kvdoctor.addons.conversions.graphs.conversion import Base, compare_calls, conclude
from kvdoctor.addons.conversions.graphs.new_cache import Rewriter
from kvdoctor.addons.conversions.graphs.token_axes import MASK, TokenAxes, is_causal, label_tokens
from kvdoctor.addons.conversions.messages import Comparison, PairedDone
from kvdoctor.analysis.completeness import is_cacheless
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array
from kvdoctor.decode.messages import PairedSide
from kvdoctor.diagnose.float32 import write_float32_copy
from kvdoctor.errors import CannotCheck, UsageError, as_argument, describe_crash
from kvdoctor.model.operators import has
from kvdoctor.model.output_folder import whole_folder
from kvdoctor.model.proto import ModelProto, NodeProto
from kvdoctor.model.traverse import describe_node, input_of, opset_version
from kvdoctor.repair.fix_report import report_fix, report_unproved
from kvdoctor.repair.pipeline import diagnose, diagnose_copy
from kvdoctor.repair.proof import prove_loops
from kvdoctor.repair.session import Applied, Conversion, Outcome, RepairSession
from kvdoctor.repair.workspace import (
    CannotConvert,
    CannotRepair,
    WorkingCopy,
    copy_export,
    write_changed,
    write_reports,
)
from kvdoctor.report.repair_record import Change, Proof
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    from kvdoctor.addons.conversions.pipeline import ConvertRequest
    from kvdoctor.options import Options
    from kvdoctor.report.document import Report

TITLE = "cache growing"
LEAST_OPSET = 11
"""The first opset whose Slice takes negative steps and bounds as inputs."""

LOOP = (
    "The first call is fed pasts of length 0 and the prompt; each later one the presents of the call before, and the "
    "new tokens alone.",
    "A mask of the tokens has past + new columns; position_ids, where there is such an input, are those of the new "
    "tokens.",
    "A call returns the logits of its new tokens.",
)
DYNAMIC = (
    "Its products with int8 weights take one scale from all tokens of a call: with fewer tokens in a call that scale, "
    "and so the logits and some tokens, differ from the original's; the proof says by how much."
)


def find_cacheless(path: str) -> ModelFolder | None:
    """The folder of a decoder without a cache: a file that returns logits, and no stack; None if it is none."""
    if not Path(path).exists():
        return None
    folder = open_folder(path)
    found = not folder.stacks and any(is_cacheless(file) for file in folder.files)
    return folder if found else None


def advise(folder: ModelFolder, file: OnnxFile) -> str:
    """What the core says of a decoder without a cache: the command that gives it one, or what stands in the way."""
    command = f"kvdoctor convert {as_argument(folder.shown)} --cache growing"
    try:
        _follow(file.graph.model, file)
    except CannotRepair as reason:
        return f"{command} would refuse it: {reason}"
    except Exception as error:  # advice must not cost the diagnosis
        return f"{command} would refuse it: its graph cannot be followed ({type(error).__name__}: {error})"
    return f"{command} -o {folder.name_copy('CACHED')} makes a copy that has one, and proves it"


def _follow(model: ModelProto, file: OnnxFile) -> tuple[TokenAxes, Inputs]:
    opset = opset_version(model.opset_import)
    if opset < LEAST_OPSET:
        raise CannotRepair(f"{file.name} has opset {opset}, and a cache needs {LEAST_OPSET}")
    if model.functions:
        raise CannotRepair(f"{file.name} has functions of its own; inline them first (onnx.inliner)")
    given = read_inputs(file)
    walk = label_tokens(model.graph, read_sizes(model, file.path, given), opset, given)
    refuse_acausal(walk)
    return walk, given


def convert_cacheless(request: "ConvertRequest", folder: ModelFolder, options: "Options") -> "Report":
    """Convert a decoder without a cache, and prove the copy.

    Raises:
        UsageError: it cannot be converted, with the node; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    copy = WorkingCopy(folder)
    file, *more = (file for file in folder.files if is_cacheless(file))
    if more:
        names = ", ".join(one.name for one in (file, *more))
        raise _refuse(folder, f"several files return logits ({names}); give the one to convert")
    try:
        graph = copy.model(file.name)
        walk, given = _follow(graph, file)
        changes = Rewriter(graph, file.name, walk, given).run()
    except CannotRepair as reason:
        raise _refuse(folder, str(reason)) from None
    except MemoryError:
        raise
    except Exception as error:  # a graph that no form foresees must not end in a traceback
        raise _refuse(folder, describe_crash("the conversion", error)) from None
    copy.changed.add(file.name)
    with Runtime(options.limits) as runtime, scratch_folder() as scratch:
        before = diagnose(request.path, options, runtime, Path(scratch, "before"))
        with whole_folder(Path(request.out or Path(scratch, "out"))) as pending:
            shown, model = request.out or request.path, "." if Path(request.path).is_dir() else Path(request.path).name
            session = RepairSession(options, runtime, Path(scratch), folder, before, shown, pending.path, model)
            copy_export(folder, pending.path)
            write_changed(copy, pending.path, {file.name: (TITLE,)})
            outcome, gain = _prove(session, changes, loop=(*LOOP, *([DYNAMIC] if walk.dynamic else [])))
            if not outcome.holds:
                unproved = report_unproved(session, outcome, may_keep=False)
                text = f"{file.name} has no cache, and a copy with one is not proved, as the lines above say"
                left = tuple(replace(one, reason=text) if one.essential else one for one in unproved.not_checked)
                return replace(unproved, command="convert", not_checked=left)
            report = report_fix(session, outcome, request.out)
            gains = [
                f"{stack}: {'; '.join(f'{n} tokens: {old / new:.2g} times as fast' for n, (old, new) in times.items())}"
                for stack, times in gain.items()
            ]
            cost = {**report.measured["cost"], "decoding": gain, "gains": gains}
            report = replace(report, command="convert", measured={**report.measured, "cost": cost})
            if request.out is not None:
                write_reports(pending.path, report)
                pending.kept = True
    return report


def _refuse(folder: ModelFolder, reason: str) -> UsageError:
    return CannotConvert(f"{folder.shown!r} cannot be converted (--{TITLE}): {reason}")


def _prove(
    session: RepairSession, changes: tuple[Change, ...], loop: tuple[str, ...]
) -> tuple[Outcome, dict[str, Any]]:
    """Diagnose the copy, and compare it with the original; gives the times of decoding as well."""
    after = diagnose_copy(session, session.model)
    stack = next((one.name for one in after.report.stacks), "")
    summary = (__doc__ or "").partition("\n")[0]
    applied = Applied(stack, Conversion(TITLE, summary, loop=loop), changes)
    outcome = Outcome(session.before, after, (applied,), (), ())
    contract = after.contract(stack)
    claim = "new rows of logits of every call are those of the original, which takes all tokens"
    if contract is None or not contract.slots:
        proof = [Proof(stack, claim, False, "the cache contract of the copy could not be read")]
        return replace(outcome, proof=tuple(proof)), {}
    compared, seconds = _compare(session, PairedSide(stack, session.at.absolute(), contract), claim)
    # Whether the copy is healthy, also at lengths of which the comparison with the original has none.
    listed, report = after.report.findings, after.report
    found = sorted({one.name for one in listed if one.severity == "error" or one.use == "full-context"})
    detail = ", ".join(found) or "; ".join(one.reason for one in report.not_checked if one.essential)
    healthy = Proof(stack, "step-test calls the copy healthy", report.verdict == "healthy" and not found, detail)
    proof = [*prove_loops(stack, after), healthy, *compared]
    return replace(outcome, proof=tuple(proof)), {stack: seconds} if seconds else {}


def _compare(
    session: RepairSession, side: PairedSide, claim: str
) -> tuple[list[Proof], dict[str, tuple[float, float]]]:
    """Compare the copy with the original, and the times of both.

    Where a scale is taken from the tokens of a call, as of int8 weights, both are compared without that rounding.
    """
    whole = PairedSide(side.stack, session.folder.root.absolute(), _without_cache(side.contract))
    done = compare_calls(session, whole, side, Comparison())
    if not done.failed or side.contract.exactness == "float":
        return list(_conclude(side.stack, claim, done)), done.seconds
    claim += f"; both in float32, without {side.contract.exactness} arithmetic"
    copy, exact = (session.scratch / name for name in ("exact-copy", "exact-original"))
    copy.mkdir()
    exact.mkdir()
    try:
        made = write_float32_copy(session.open_copy(".").files, side.contract, copy)
        write_float32_copy(session.folder.files, side.contract, exact)
    except CannotCheck as reason:
        return [Proof(side.stack, claim, False, f"{done.failed}; {reason}")], {}
    sides = (
        PairedSide(side.stack, exact.absolute(), _without_cache(made)),
        PairedSide(side.stack, copy.absolute(), made),
    )
    proof = list(_conclude(side.stack, claim, compare_calls(session, *sides, Comparison())))
    rounded = compare_calls(session, whole, side, Comparison(allowed=math.inf))
    text = rounded.failed or f"{rounded.calls} calls, their logits off by up to {rounded.worst:.1e} standard deviations"
    proof.append(Proof(side.stack, "with that rounding, every call runs on the copy as well", not rounded.failed, text))
    return proof, rounded.seconds


def _without_cache(contract: CacheContract) -> CacheContract:
    """The contract of the original, of that of its copy: no pasts and no presents."""
    graphs = {
        name: replace(
            graph,
            inputs=tuple(port for port in graph.inputs if port.role != "past"),
            outputs=tuple(port for port in graph.outputs if port.role != "present"),
        )
        for name, graph in contract.graphs.items()
    }
    return replace(contract, graphs=graphs, slots=())


def _conclude(stack: str, claim: str, done: PairedDone) -> Iterator[Proof]:
    yield conclude(Proof(stack, claim, False), done, Comparison(), Base(stack, None))
    if done.decoded:
        text = f"{done.decoded} tokens are the same"
        yield Proof(stack, "greedy decoding chooses the tokens of the original", True, text)


HIDING = -1e4
"""Scores that are lowered to this value, or by it, have no weight."""
MOST_STEPS = 64


def refuse_acausal(walk: TokenAxes) -> None:
    """Refuse a graph with an attention that sees later tokens: what a call computes would change with the next.

    A mask whose numbers are not known is left to the comparison with the original.

    Raises:
        CannotRepair: with the node that weighs later tokens.
    """
    for node in (*walk.softmaxes, *walk.fused):
        hidden = _find_hidden(walk, node) if node in walk.softmaxes else _find_fused(walk, node)
        if hidden is not None and not hidden[np.triu_indices(len(hidden), 1)].all():
            raise CannotRepair(
                f"the node {describe_node(node)} stands in the way: it weighs later tokens, so the model is not "
                "causal, and keys and values of a token change with those after it"
            )


def _find_hidden(walk: TokenAxes, softmax: NodeProto) -> Array | None:
    """Which keys (columns) each query (rows) never sees, bool[tokens, tokens]; None where a mask is not known."""
    count = walk.sizes.lengths[0]
    hidden = np.zeros((count, count), bool)
    name = softmax.input[0]
    for _ in range(MOST_STEPS):
        node = walk.makers.get(name)
        if node is None or has(node.op_type, "product") or not has(node.op_type, "elementwise", "copy", "cast", "view"):
            return hidden
        for other in node.input:
            if other in walk.labels or not walk.sizes.varies(other):
                continue
            found = _read_mask(walk, node, other)
            if found is None:
                return None
            hidden |= found
        followed = [one for one in node.input if "total" in walk.own(one)]
        if len(followed) != 1:
            return None
        name = followed[0]
    return None


def _find_fused(walk: TokenAxes, node: NodeProto) -> Array | None:
    count, name = walk.sizes.lengths[0], input_of(node, MASK)
    if is_causal(node) or not name:
        return np.triu(np.full((count, count), is_causal(node)), 1)
    numbers = walk.sizes.short[name].numbers
    if numbers is None or numbers.shape[-2:] != (count, count):
        return None
    hidden: Array = np.logical_not(numbers) if numbers.dtype == bool else numbers <= HIDING
    return np.asarray(hidden.reshape(-1, count, count).all(axis=0))


def _read_mask(walk: TokenAxes, node: NodeProto, name: str) -> Array | None:
    """What one operand hides in every batch and head; None where its numbers are not known."""
    value = walk.sizes.short[name]
    numbers = value.numbers
    if numbers is None:
        return None
    if has(node.op_type, "select"):
        at = [one in walk.labels for one in node.input]
        if name != node.input[0] or at[0]:
            return None
        other = walk.sizes.short[node.input[1 if at[2] else 2]].numbers
        if other is None or not bool((other <= HIDING).all()):
            return None
        numbers = np.where(numbers if at[2] else ~numbers.astype(bool), HIDING, 0)
    elif not has(node.op_type, "add"):
        return None
    return _as_square(numbers <= HIDING, walk.own(node.output[0]), walk.sizes.lengths[0])


def _as_square(hidden: Array, labels: Labels, count: int) -> Array:
    """By query and key, whether an entry is hidden for all others."""
    shape = hidden.shape
    hidden = hidden.reshape((1,) * (len(labels) - len(shape)) + shape)
    query, key = labels.index("new"), labels.index("total")
    others = tuple(at for at in range(len(labels)) if at not in (query, key))
    flat = hidden.all(axis=others) if others else hidden
    square: Array = np.broadcast_to(flat if query < key else flat.T, (count, count))
    return square
