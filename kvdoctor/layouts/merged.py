"""Merged: both halves of a pair in one file, as Optimum's decoder_model_merged.onnx; names stay those of the pair.

Requires: a graph without past and one with it, of the same opset. Ensures: one input more, `use_cache_branch`; a decode
step returns the cross-attention cache that it was given, so that a plain loop works; equal weights stand once.
"""

from kvdoctor.contract import CacheContract
from kvdoctor.layouts import Layout, Made, Source
from kvdoctor.layouts.joining import MERGED, held, joined, name_half
from kvdoctor.layouts.naming import axis_names, name_axes, unified_names
from kvdoctor.stacks import StackFiles


def refuses(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot be merged."""
    if stack.kind == "merged":
        return "it is a merged decoder already"
    if stack.kind != "pair":
        return "there is only one graph for the first and for later steps: nothing to merge"
    first, later = unified_names(contract)
    for names in (first.inputs, later.inputs, first.outputs, later.outputs):
        if len(set(names.values())) < len(names):
            return "two of its ports would get one name: the contract does not tell them apart"
    return None


def make(source: Source) -> Made:
    """Merge the two graphs of a pair."""
    first, later = source.halves
    names = unified_names(source.contract)
    made = Made({}, (source.name("decoder"), source.name("decoder-with-past")))
    for half, chosen, is_later in ((first, names[0], False), (later, names[1], True)):
        name_half(half, source, is_later, chosen)
        if source.readable:
            name_axes(half.graph, chosen.axes, axis_names(source.contract))
    made.models[source.new_name(MERGED)] = joined(source, first, later, held(source.contract, *names), made)
    return made


LAYOUT = Layout("merged", "one file with an If on use_cache_branch", (MERGED,), refuses, make)
