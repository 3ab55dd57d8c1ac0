"""Whether a changed graph still computes what the original does, at the sizes that the original takes: bit for bit."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import Axis, Graph, Port
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.place.bench import side
from kvdoctor.place.variants import Variant, read_located, rerooted
from kvdoctor.runtimes import Runtime

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

SMALL: dict[Axis, int] = {"batch": 2, "past": 5, "new": 3, "encoder": 7}
"""Sizes for axes that take any."""

SEED = 7


class Differs(Exception):
    """The changed graph computes something else, or does not run; the text says what."""


def hold_against(  # noqa: PLR0913 - by keyword
    source: Path,
    changed: ModelProto,
    graph: Graph,
    *,
    runtime: Runtime,
    provider: str,
    sizes: Mapping[Axis, int] | None = None,
) -> int:
    """Run the file and its changed copy on the same feeds, in every branch, and compare every output.

    Feeds are made up by the seed: whatever they are, both must make the same of them. `sizes` are those at which the
    original is known to run.

    Returns:
        How many calls were compared: one that the original itself refuses tells nothing.

    Raises:
        Differs: they do not compute the same.
        WorkerDied: the runtime did not live through it.
    """
    from kvdoctor.kept_calls import save_call

    with tempfile.TemporaryDirectory(prefix="kvdoctor-") as folder:
        copy = ModelProto()
        copy.CopyFrom(changed)
        sides = [
            _written(m, source, Path(folder, f"{n}.onnx")) for m, n in ((read_located(source), "old"), (copy, "new"))
        ]
        compared = 0
        for switch in (True, False) if graph.port("branch_switch") else (True,):
            feeds = Path(folder, f"feeds{int(switch)}.npz")
            save_call(feeds, made_up(graph, switch, sizes))
            pairs = [(port.name, port.name, ()) for port in graph.outputs]
            job = {"left": side(sides[0], feeds), "right": side(sides[1], feeds), "pairs": pairs, "inject": []}
            told = runtime.trial({"trial": "compare", **job, "provider": provider})
            if "error" in told:
                alone = runtime.trial({"trial": "run", "model": side(sides[0], feeds), "provider": provider})
                if "error" in alone:
                    continue
                raise Differs(f"at the sizes of the trace it does not run any more: {told['error']}")
            compared += 1
            for (name, _, _), found in zip(pairs, told["pairs"], strict=True):
                if found is None or found["relative"] != 0:
                    raise Differs(f"at the sizes of the trace {name} is no longer what it was")
    return compared


def _written(model: ModelProto, source: Path, to: Path) -> Variant:
    root = rerooted(model, source)
    to.write_bytes(model.SerializeToString())
    return Variant(to, root, {})


def made_up(graph: Graph, switch: bool, given: Mapping[Axis, int] | None = None) -> "dict[str, Array]":
    """Feeds in the sizes that the inputs declare."""
    import numpy as np

    from kvdoctor.calls import NUMPY_TYPES

    random, sizes = np.random.default_rng(SEED), _sizes(graph, given or {})
    feeds: dict[str, Array] = {}
    for port in graph.inputs:
        shape = _shape(port, sizes)
        if port.dtype == "bool":
            feeds[port.name] = np.full(shape, switch)
        elif port.dtype.startswith(("int", "uint")):
            feeds[port.name] = _integers(port, shape, sizes, random).astype(NUMPY_TYPES[port.dtype])
        else:
            feeds[port.name] = random.standard_normal(shape).astype(NUMPY_TYPES[port.dtype])
    return feeds


def _sizes(graph: Graph, given: Mapping[Axis, int]) -> dict[Axis, int]:
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


def _shape(port: Port, sizes: dict[Axis, int]) -> list[int]:
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


def _integers(port: Port, shape: list[int], sizes: dict[Axis, int], random: "np.random.Generator") -> "Array":
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
