"""Frees an axis of a file, and compares the changed graph with the original at the traced sizes, bit for bit."""

import math
import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.contract import Axis, Graph, Port
from kvdoctor.decode.messages import CompareJob, TrialJob, ValuePair
from kvdoctor.diagnose.locate.graph_runner import side
from kvdoctor.diagnose.locate.runnable import Variant, read_located, share_root
from kvdoctor.errors import WorkerDied
from kvdoctor.model.proto import ModelProto
from kvdoctor.repair.shapes.freeing import Edit, free_axes
from kvdoctor.repair.shapes.terms import EXPORT_AGAIN, size_of
from kvdoctor.repair.workspace import CannotRepair, Change, RepairContext
from kvdoctor.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np

    from kvdoctor.decode.calls import Array


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
    """Free an axis of one file, and compare it with the original at the traced sizes."""
    graph, model, before = find_graph(context, file), context.model(file), ModelProto()
    before.CopyFrom(model)
    if any(slot.window is not None or slot.trimmed for slot in context.drivable.slots):
        raise CannotRepair("a window hides older tokens, and a traced mask does not show its width", EXPORT_AGAIN)
    edits = free_axes(model, graph, (kind,), partial(context.values, file))
    if edits and not compare_with_original(context, file, before=before):
        raise CannotRepair(f"{file} runs at no size, so the change cannot be compared with the original", EXPORT_AGAIN)
    return list_changes(file, edits)


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


def list_changes(file: str, edits: tuple[Edit, ...]) -> tuple[Change, ...]:
    """Edits as changes of the report."""
    return tuple(Change(file, edit.where, edit.before, edit.after) for edit in edits)
