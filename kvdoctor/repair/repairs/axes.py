"""Repairs of sizes that are fixed: lengths that the graph declares or bakes in, and an empty past.

The changed graph is compared with the original at the traced sizes in the worker, bit for bit.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.analysis.proof.types import Term
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.contract import Axis, Graph, Port
from kvdoctor.decode.messages import CompareJob, TrialJob, ValuePair
from kvdoctor.diagnose.locate.graph_runner import side
from kvdoctor.diagnose.locate.runnable import Variant, read_located, share_root
from kvdoctor.errors import WorkerDied
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import describe_node, name_node
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.facts import WalkedReshape
from kvdoctor.repair.shapes.freeing import AxisFreeing, Values, free_axes, read_declared_sizes, set_allowzero
from kvdoctor.repair.shapes.reshapes import write_target
from kvdoctor.repair.shapes.terms import CHOSEN, EXPORT_AGAIN, CannotFree, read_lengths, size_of
from kvdoctor.repair.shapes.writing import Writer
from kvdoctor.repair.workspace import CannotRepair, Change, RepairContext
from kvdoctor.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np

    from kvdoctor.decode.calls import Array

FAILING = ("step-fails", "chunk-fails")


def free_baked_sizes(context: RepairContext) -> tuple[Change, ...]:
    """Frees lengths that the graph declares as open but that numbers inside it fix.

    Requires: a step that fails (`step-fails`, `chunk-fails`) in a graph in which a length meets a number that it cannot
    equal: in a Reshape, an Expand, an addition, a concatenation. The traced length is found by trial: with the right
    one, no conflict is left.
    Ensures: the numbers that stood for the length are computed from the shapes of the inputs, or copied from the data;
    at the traced sizes every output is equal to the original's, bit for bit.
    """
    made: tuple[Change, ...] = ()
    for file in context.files_of(*FAILING):
        changes, traced = free_baked_lengths(
            context.model(file), find_graph(context, file), partial(context.values, file)
        )
        compare_with_original(context, file, traced)
        made += changes
    return made


MOST_LENGTHS = 3
MOST_NUMBER = 4096
"""Larger numbers are widths and vocabularies."""


def free_baked_lengths(model: ModelProto, graph: Graph, values: Values) -> tuple[tuple[Change, ...], dict[Axis, int]]:
    """Free the lengths that numbers inside a model fix, in place; gives the sizes at which it was traced as well.

    Raises:
        CannotFree: no number conflicts with a length, or the graph does not tell which length is meant.
    """
    supposed, current = dict[Axis, int](), _walk_supposing(model, graph, {}, values)
    if not current.conflicts:
        text = "no number in the graph conflicts with a length that it declares as open"
        for node, size in sorted(current.walk.notes.ends, key=lambda end: end[1])[:1]:
            text += f'; Slice "{name_node(node)}" takes rows of a table that has {size}'
            text += ", and further rows are not in the file"
        raise CannotFree(text)
    while current.conflicts and len(supposed) < MOST_LENGTHS:
        tried = [(more, _walk_supposing(model, graph, more, values)) for more in _suggest_sizes(current, supposed)]
        better = [(more, one) for more, one in tried if len(one.conflicts) < len(current.conflicts)]
        if not better:
            break
        supposed, current = min(better, key=lambda two: (len(two[1].conflicts), len(two[1].facts.bound)))
    for conflict in current.conflicts[:1]:
        raise CannotFree(
            f'in {conflict.node.op_type} "{conflict.node.name}" {conflict.words}, and no traced length explains it'
        )
    return current.run(), supposed


def _walk_supposing(model: ModelProto, graph: Graph, sizes: dict[Axis, int], values: Values) -> AxisFreeing:
    return AxisFreeing(model, read_lengths(graph, read_declared_sizes(model), supposed=sizes), values)


def _suggest_sizes(current: AxisFreeing, supposed: dict[Axis, int]) -> Iterator[dict[Axis, int]]:
    """Traced sizes that the conflicts suggest: each number that meets a length, for each length that it meets."""
    seen = set[tuple[Axis, int]]()
    for conflict in current.conflicts:
        numbers = sorted({n for term in conflict.sizes if (n := term.number) is not None and 0 < n <= MOST_NUMBER})
        symbols = {name for term in conflict.sizes for name in term.symbols}
        factors = {str(q) for a in conflict.sizes for b in conflict.sizes if a != b and (q := a.divided(b)) is not None}
        for kind in (kind for kind in CHOSEN if kind in symbols and kind not in supposed):
            # One size is a multiple of the other by a length: that length was 1.
            for number in dict.fromkeys([*numbers, *([1] if kind in factors else [])]):
                if (kind, number) not in seen:
                    seen.add((kind, number))
                    yield {**supposed, kind: number}


TRACED_ADVICE = ("Without a change to the model: only calls at the traced sizes work.",)


TITLE = "Frees {} if it is declared or baked into the graph as a number."
FREED: tuple[tuple[str, str, Axis, str], ...] = (
    ("free-batch", "batch-axis-frozen", "batch", TITLE.format("the number of sequences")),
    ("free-past", "past-axis-frozen", "past", TITLE.format("the length of the past")),
    ("free-sequence", "sequence-axis-frozen", "new", TITLE.format("the number of new tokens")),
)
LENGTH_ADVICE = ("Without a change to the model: only steps at exactly that length work.",)


def accept_empty(context: RepairContext) -> tuple[Change, ...]:
    """Makes Reshapes accept a past of length 0.

    Requires: `empty-past-rejected`, and a Reshape whose target is undefined or refers to another axis if the past is
    empty: a -1 together with a 0, or a computed 0 that the operator takes for "copy this axis".
    Ensures: the target gives the same axes for an empty past as for every other length; nothing else is changed.
    """
    file = context.file_of("prefill")
    changes = accept_empty_past(context.model(file), find_graph(context, file))
    if not changes:
        context.cannot(
            "no Reshape fails for an empty past, and operators that do cannot be changed to accept one", EXPORT_AGAIN
        )
    compare_with_original(context, file)
    return changes


EMPTY = frozenset(("past",))


def accept_empty_past(model: ModelProto, graph: Graph) -> tuple[Change, ...]:
    """Rewrite the targets of such Reshapes in place, so that they are right for an empty past as well.

    Raises:
        CannotFree: a 0 in a target would have to mean 0, which the opset does not support.
    """
    reading = AxisFreeing(model, read_lengths(graph, read_declared_sizes(model)))
    writer, changes = Writer(model, reading.lengths), list[Change]()
    for one in reading.walk.notes.reshapes.values():
        allowzero = any(a.name == "allowzero" and a.i for a in one.node.attribute)
        broken = next((said for said in one.targets if not is_right_when_empty(one, said, allowzero, reading)), None)
        if broken is None:
            continue
        target = write_target(one.into, one.out, allowzero, EMPTY)
        if target.allowzero and not allowzero:
            set_allowzero(one.node, writer.opset)
        one.node.input[1] = writer.vector(target.entries)
        before, after = (f"[{', '.join(map(str, entries))}]" for entries in (broken, target.entries))
        changes.append(Change(graph.file, f"{describe_node(one.node)}, input 1", before, after))
    writer.done()
    return tuple(changes)


def is_right_when_empty(one: WalkedReshape, said: tuple[Term, ...], allowzero: bool, reading: AxisFreeing) -> bool:
    """Whether a target gives the right axes for an empty past, by the rules of the operator."""
    nothing = dict.fromkeys(EMPTY, whole(0))
    size = reading.facts.size
    into, wanted, entries = ([size(t.replaced(nothing)) for t in terms] for terms in (one.into, one.out, said))
    filled = [into[i] if n == 0 and not allowzero and i < len(into) else n for i, n in enumerate(entries)]
    if -1 in filled:
        total, rest = math.prod(into), -math.prod(filled)
        if rest == 0 or total % rest:
            return False
        filled[filled.index(-1)] = total // rest
    return filled == wanted


SMALL: dict[Axis, int] = {"batch": 2, "past": 5, "new": 3, "encoder": 7}
"""Sizes for open axes."""

SEED = 7
BYTES_EACH = 24
"""Bytes that a number fed takes at most: drawn as float64, converted, and packed for the worker."""


def synthesize_feeds(
    graph: Graph, switch: bool, given: Mapping[Axis, int] | None = None, most: int = sys.maxsize
) -> "dict[str, Array]":
    """Synthetic feeds in the sizes that the inputs declare.

    Raises:
        CannotRepair: they would take more than `most` bytes.
    """
    import numpy as np

    from kvdoctor.decode.calls import NUMPY_TYPES

    random, sizes = np.random.default_rng(SEED), _choose_sizes(graph, given or {})
    feeds: dict[str, Array] = {}
    shapes = {port.name: _choose_shape(port, sizes) for port in graph.inputs}
    if sum(map(math.prod, shapes.values())) * BYTES_EACH > most:
        raise CannotRepair("its inputs are too large to be fed within the memory limit", EXPORT_AGAIN)
    for port in graph.inputs:
        shape = shapes[port.name]
        if port.dtype == "bool":
            feeds[port.name] = np.full(shape, switch)
        elif port.dtype.startswith(("int", "uint")):
            feeds[port.name] = _synthesize_integers(port, shape, sizes, random).astype(NUMPY_TYPES[port.dtype])
        else:
            feeds[port.name] = random.standard_normal(shape).astype(NUMPY_TYPES[port.dtype])
    return feeds


def _choose_sizes(graph: Graph, given: Mapping[Axis, int]) -> dict[Axis, int]:
    found = {**SMALL, **given}
    for kind in SMALL:
        axes = (axis for port in graph.inputs for axis in zip(port.axes, port.shape or (), strict=False))
        numbers = (size_of(dim) for axis, dim in axes if axis == kind)
        found[kind] = min((number for number in numbers if number is not None), default=found[kind])
    if not any("past" in port.axes for port in graph.inputs):
        found["past"] = 0
    return found


def _choose_shape(port: Port, sizes: dict[Axis, int]) -> list[int]:
    shape = []
    for at, dim in enumerate(port.shape or ()):
        axis = port.axes[at] if at < len(port.axes) else "fixed"
        if (number := size_of(dim)) is not None:
            shape.append(number)
        elif axis == "total":
            shape.append(sizes["past"] + sizes["new"])
        else:
            shape.append(sizes.get(axis, 3))
    return shape


def _synthesize_integers(
    port: Port, shape: list[int], sizes: dict[Axis, int], random: "np.random.Generator"
) -> "Array":
    import numpy as np

    past, new = sizes["past"], sizes["new"]
    if port.role in ("position_ids", "cache_position"):
        return np.broadcast_to(np.arange(past, past + new), shape)
    counted = {"past_length": past, "write_index": past, "total_length": past + new, "last_index": past + new - 1}
    if port.role in counted:
        return np.full(shape, counted[port.role])
    if port.role == "token_ids":
        return random.integers(4, 12, shape)
    return np.ones(shape)


def free_axis(context: RepairContext, check: str, kind: Axis) -> tuple[Change, ...]:
    """Free one kind of axis in every file for which the check reports it as a warning or an error.

    Requires: a graph whose numbers show which of them stand for the length: at any other length, something could not be
    added, joined or reshaped. Values that were computed for the traced length (rows of a table of positions, distances)
    must not be folded into the graph: what they were computed from is not in the file.
    Ensures: inputs and outputs declare the length by a name; the numbers that stood for it are computed from the shapes
    of the inputs; at the traced length every output is equal to the original's, bit for bit.

    Raises:
        CannotRepair: a graph does not tell what it has to compute at other lengths, or it then returns other outputs.
    """
    files = dict.fromkeys(f.file for f in context.found(check) if f.severity != "note" and f.file is not None)
    return tuple(change for file in files for change in _free_axis_of_file(context, file, kind))


def _free_axis_of_file(context: RepairContext, file: str, kind: Axis) -> tuple[Change, ...]:
    graph, model, before = find_graph(context, file), context.model(file), ModelProto()
    before.CopyFrom(model)
    if any(slot.window is not None or slot.trimmed for slot in context.drivable.slots):
        raise CannotRepair("a window hides older tokens, and a traced mask does not show its width", EXPORT_AGAIN)
    changes = free_axes(model, graph, (kind,), partial(context.values, file))
    if changes and not compare_with_original(context, file, before=before):
        raise CannotRepair(f"{file} runs at no size, so the change cannot be compared with the original", EXPORT_AGAIN)
    return changes


def find_graph(context: RepairContext, file: str) -> Graph:
    """The graph of a file as the contract describes it."""
    return next(graph for graph in context.drivable.graphs.values() if graph.file == file)


def compare_with_original(
    context: RepairContext, file: str, sizes: Mapping[Axis, int] | None = None, before: ModelProto | None = None
) -> int:
    """Run a file and its changed copy on the same synthetic feeds, in every branch, and compare every output.

    `sizes` are those at which the original is known to run. `before` is the file after the repairs so far, which are
    proved by themselves; without it the original is compared.

    Returns:
        The number of calls that were compared; a call that the original itself refuses does not count.

    Raises:
        CannotRepair: the outputs differ, or the worker process crashed.
    """
    try:
        compared, reason = _compare_calls(context, file, sizes, before)
    except WorkerDied as death:
        raise CannotRepair(f"the worker process crashed on the changed graph: {death.how}", EXPORT_AGAIN) from None
    if reason is not None:
        context.cannot(f"the change of {file} was rejected: at the traced sizes {reason}", EXPORT_AGAIN)
    return compared


def _compare_calls(
    context: RepairContext, file: str, sizes: Mapping[Axis, int] | None, before: ModelProto | None
) -> tuple[int, str | None]:
    """The number of calls that agree, and what differs in the first that does not."""
    from kvdoctor.decode.calls import save_call

    source, graph = Path(context.copy.file(file).path), find_graph(context, file)
    runtime, provider = context.running, context.options.provider
    changed = deepcopy(context.model(file))
    with scratch_folder() as folder:
        variants = []
        for model, name in ((before or read_located(source), "old"), (changed, "new")):
            variants.append(Variant(Path(folder, f"{name}.onnx"), share_root(model, source), {}))
            variants[-1].path.write_bytes(model.SerializeToString())
        compared = 0
        for switch in (True, False) if graph.port("branch_switch") else (True,):
            feeds = Path(folder, f"feeds{int(switch)}.npz")
            save_call(feeds, synthesize_feeds(graph, switch, sizes, runtime.limits.memory_limit()))
            sides = tuple(side(variant, feeds) for variant in variants)
            pairs = tuple(ValuePair(port.name, port.name) for port in graph.outputs)
            done = runtime.trial(CompareJob(sides[0], sides[1], pairs, provider=provider))
            if done.error is not None and runtime.trial(TrialJob(sides[0], provider=provider)).error is not None:
                continue
            if done.error is not None:
                return compared, f"it no longer runs: {done.error}"
            compared += 1
            for pair, found in zip(pairs, done.differences, strict=True):
                if found is None or found.relative != 0:
                    return compared, f"the output {pair.left} differs from the original's"
    return compared, None


HIDDEN_ROW_ADVICE = ("Feed the first step a past of one row that the attention mask hides, if the model has a mask.",)


REPAIRS = (
    Repair("free-baked-sizes", FAILING, "axes", "bits", free_baked_sizes, TRACED_ADVICE),
    *(
        Repair(name, (check,), "axes", "sizes", partial(free_axis, check=check, kind=kind), LENGTH_ADVICE, title)
        for name, check, kind, title in FREED
    ),
    Repair("empty-past", ("empty-past-rejected",), "axes", "bits", accept_empty, HIDDEN_ROW_ADVICE),
)
