"""Single: the graph that takes the past serves the first step as well, with an empty past; Optimum's names, model.onnx.

Requires: a pair without an encoder, whose later graph takes any number of new tokens and a past of any length. Ensures:
model.onnx, as Optimum exports decoders today. That an empty past works is for the second diagnosis to show.
"""

from kvdoctor.contract import CacheContract
from kvdoctor.layouts import Layout, Made, Source
from kvdoctor.layouts.joining import SINGLE
from kvdoctor.layouts.naming import optimum_names, unnameable
from kvdoctor.layouts.optimum import INSIDE, name_half_as_optimum
from kvdoctor.stacks import StackFiles


def refuses(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why the later graph of a stack cannot serve the first step."""
    if stack.kind != "pair":
        return "it is no pair; a decoder that is one graph gets Optimum's names with --layout optimum"
    if contract.has_encoder_states or contract.of_kind("cross-attention"):
        return "its cross-attention cache is made by the graph of the first step, which is needed"
    fixed = next((p for p in contract.graph("decode").inputs if "new" in p.axes and _size(p.shape, p.axes)), None)
    if fixed is not None:
        return f"its later graph takes {_size(fixed.shape, fixed.axes)} new token at a time: export it with several"
    if contract.frozen_past is not None:
        return f"the past of its later graph has the fixed length {contract.frozen_past}"
    return unnameable(contract)


def _size(shape: object, axes: tuple[str, ...]) -> int | None:
    size = shape[axes.index("new")] if isinstance(shape, tuple) else None
    return size if isinstance(size, int) else None


def make(source: Source) -> Made:
    """Take the later graph alone."""
    made = Made({}, (source.name("decoder"), source.name("decoder-with-past")), room=INSIDE)
    later = source.model("decoder-with-past")
    name_half_as_optimum(later, source, True, optimum_names(source.contract, "decode"), made)
    made.models[source.new_name(SINGLE)] = later
    return made


LAYOUT = Layout("single", "the later graph of a pair alone, as model.onnx", (SINGLE,), refuses, make)
