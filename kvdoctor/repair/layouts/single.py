"""Single: the graph that takes the past serves the first step as well, with an empty past; Optimum's names, model.onnx.

Requires: a pair without an encoder, whose later graph takes any number of new tokens and a past of any length.
Ensures: model.onnx, as Optimum exports decoders today. The second diagnosis shows whether an empty past works.
"""

from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.repair.layouts.naming import SINGLE, find_unnameable, optimum_names
from kvdoctor.repair.layouts.optimum import INSIDE, name_half_as_optimum
from kvdoctor.repair.layouts.registry import ConvertedModels, Layout, LayoutSource


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why the later graph of a stack cannot serve the first step."""
    if stack.kind != "pair":
        return "it is not a pair; a decoder that is one graph gets Optimum's names with --layout optimum"
    if contract.has_encoder_states or contract.of_kind("cross-attention"):
        return "its cross-attention cache is computed by the graph of the first step, which is therefore needed"
    count = next((size for port in contract.graph("decode").inputs if (size := port.size("new"))), None)
    if count is not None:
        return f"its later graph takes {count} new token at a time: export it with several new tokens"
    if contract.frozen_past is not None:
        return f"the past of its later graph has the fixed length {contract.frozen_past}"
    return find_unnameable(contract)


def make(source: LayoutSource) -> ConvertedModels:
    """Convert the later graph alone."""
    made = ConvertedModels({}, (source.name("decoder"), source.name("decoder-with-past")), limit=INSIDE)
    later = source.model("decoder-with-past")
    name_half_as_optimum(later, source, True, optimum_names(source.contract, "decode"), made)
    made.models[source.new_name(SINGLE)] = later
    return made


LAYOUT = Layout("single", "the later graph of a pair alone, as model.onnx", (SINGLE,), refuse, make)
