"""Frees an axis of a file, and compares the changed graph with the original at the traced sizes, bit for bit."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import Axis, Graph, Port
from kvdoctor.decode.messages import CompareJob, TrialJob, ValuePair
from kvdoctor.diagnose.locate.graph_runner import side
from kvdoctor.diagnose.locate.runnable import Variant, read_located, share_root
from kvdoctor.errors import WorkerDied
from kvdoctor.model.proto import ModelProto
from kvdoctor.repair.shapes.freeing import CannotFree, Edit, free_axes
from kvdoctor.repair.workspace import CannotRepair, RepairContext
from kvdoctor.report.repair_record import Change
from kvdoctor.runtime.client import Runtime

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


SMALL: dict[Axis, int] = {"batch": 2, "past": 5, "new": 3, "encoder": 7}
"""Sizes for open axes."""

SEED = 7


class OutputsDiffer(Exception):
    """The changed graph returns other outputs, or does not run; the message says which."""


def compare_at_traced_sizes(  # noqa: PLR0913 - by keyword
    source: Path,
    changed: ModelProto,
    graph: Graph,
    *,
    runtime: Runtime,
    provider: str,
    sizes: Mapping[Axis, int] | None = None,
    before: ModelProto | None = None,
) -> int:
    """Run the file and its changed copy on the same feeds, in every branch, and compare every output.

    Feeds are synthetic; both sides get the same. `sizes` are those at which the original is known to run. `before` is
    the model before the change where other repairs changed it first: these are proved by themselves.

    Returns:
        The number of calls that were compared; a call that the original itself refuses does not count.

    Raises:
        OutputsDiffer: the outputs differ.
        WorkerDied: the worker process crashed.
    """
    from kvdoctor.decode.calls import save_call

    with tempfile.TemporaryDirectory(prefix="kvdoctor-") as folder:
        copy = ModelProto()
        copy.CopyFrom(changed)
        sides = [
            _write_variant(m, source, Path(folder, f"{n}.onnx"))
            for m, n in ((before or read_located(source), "old"), (copy, "new"))
        ]
        compared = 0
        for switch in (True, False) if graph.port("branch_switch") else (True,):
            feeds = Path(folder, f"feeds{int(switch)}.npz")
            save_call(feeds, synthesize_feeds(graph, switch, sizes))
            pairs = tuple(ValuePair(port.name, port.name) for port in graph.outputs)
            done = runtime.trial(CompareJob(side(sides[0], feeds), side(sides[1], feeds), pairs, provider=provider))
            if done.error is not None:
                alone = runtime.trial(TrialJob(side(sides[0], feeds), provider=provider))
                if alone.error is not None:
                    continue
                raise OutputsDiffer(f"at the traced sizes it no longer runs: {done.error}")
            compared += 1
            for pair, found in zip(pairs, done.differences, strict=True):
                if found is None or found.relative != 0:
                    raise OutputsDiffer(f"at the traced sizes the output {pair.left} differs from the original's")
    return compared


def _write_variant(model: ModelProto, source: Path, to: Path) -> Variant:
    root = share_root(model, source)
    to.write_bytes(model.SerializeToString())
    return Variant(to, root, {})


def synthesize_feeds(graph: Graph, switch: bool, given: Mapping[Axis, int] | None = None) -> "dict[str, Array]":
    """Synthetic feeds in the sizes that the inputs declare."""
    import numpy as np

    from kvdoctor.decode.calls import NUMPY_TYPES

    random, sizes = np.random.default_rng(SEED), _choose_sizes(graph, given or {})
    feeds: dict[str, Array] = {}
    for port in graph.inputs:
        shape = _choose_shape(port, sizes)
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
        numbers = [
            int(dim)
            for port in graph.inputs
            for axis, dim in zip(port.axes, port.shape or (), strict=False)
            if axis == kind and (isinstance(dim, int) or (isinstance(dim, str) and dim.isdecimal()))
        ]
        found[kind] = min(numbers, default=found[kind])
    if not any("past" in port.axes for port in graph.inputs):
        found["past"] = 0
    return found


def _choose_shape(port: Port, sizes: dict[Axis, int]) -> list[int]:
    shape = []
    for at, dim in enumerate(port.shape or ()):
        axis = port.axes[at] if at < len(port.axes) else "fixed"
        if isinstance(dim, int) or (isinstance(dim, str) and dim.isdecimal()):
            shape.append(int(dim))
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


EXPORT_AGAIN = "export again with dynamic axes, and with sample sizes of 2 or more, all different"


def free_axis(context: RepairContext, check: str, kind: Axis) -> tuple[Change, ...]:
    """Free one kind of axis in every file for which the check reports it as a warning or an error.

    Raises:
        CannotRepair: a graph does not tell what it has to compute at other lengths.
    """
    files = dict.fromkeys(f.file for f in context.found(check) if f.severity != "note" and f.file is not None)
    return tuple(change for file in files for change in _free_axes_of_file(context, file, (kind,)))


def _free_axes_of_file(context: RepairContext, file: str, kinds: tuple[Axis, ...]) -> tuple[Change, ...]:
    """Free axes of one file, and compare it with the original at the traced sizes.

    Raises:
        CannotRepair: the graph does not tell how, or the result returns other outputs.
    """
    graph, model, before = find_graph(context, file), context.model(file), ModelProto()
    before.CopyFrom(model)
    if any(slot.window is not None or slot.trimmed for slot in context.drivable.slots):
        raise CannotRepair("a window hides older tokens, and a traced mask does not show its width", EXPORT_AGAIN)
    try:
        edits = free_axes(model, graph, kinds, lambda tensor: context.values(file, tensor))
    except CannotFree as reason:
        raise CannotRepair(str(reason), EXPORT_AGAIN) from None
    if edits and not compare_with_original(context, file, before=before):
        raise CannotRepair(f"{file} runs at no size, so the change cannot be compared with the original", EXPORT_AGAIN)
    return list_changes(file, edits)


def find_graph(context: RepairContext, file: str) -> Graph:
    """The graph of a file as the contract describes it."""
    return next(graph for graph in context.drivable.graphs.values() if graph.file == file)


def compare_with_original(
    context: RepairContext, file: str, sizes: Mapping[Axis, int] | None = None, before: ModelProto | None = None
) -> int:
    """Compare a changed file with the original at the sizes that the original accepts; gives the number of calls.

    `before` is the file after the repairs so far, in place of the original.

    Raises:
        CannotRepair: the outputs differ at those sizes.
    """
    source, graph = Path(context.copy.file(file).path), find_graph(context, file)
    try:
        provider = context.options.provider
        return compare_at_traced_sizes(
            source, context.model(file), graph, runtime=context.running, provider=provider, sizes=sizes, before=before
        )
    except OutputsDiffer as reason:
        raise CannotRepair(f"the change of {file} was rejected: {reason}", EXPORT_AGAIN) from None
    except WorkerDied as death:
        raise CannotRepair(f"the worker process crashed on the changed graph: {death.how}", EXPORT_AGAIN) from None


def list_changes(file: str, edits: tuple[Edit, ...]) -> tuple[Change, ...]:
    """Edits as changes of the report."""
    return tuple(Change(file, edit.where, edit.before, edit.after) for edit in edits)
