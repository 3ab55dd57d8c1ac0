"""Merged: both halves of a pair in one file, as Optimum's decoder_model_merged.onnx; names stay those of the pair.

Requires: a graph without past and one with it, of the same opset.
Ensures: one additional input, `use_cache_branch`; a decode step returns the cross-attention cache that it was fed, so
that a plain loop works; equal weights are stored once.
"""

from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.repair.layouts.merging import find_kept, merge_halves
from kvdoctor.repair.layouts.naming import MERGED, axis_names, name_axes, name_half, unified_names
from kvdoctor.repair.layouts.registry import ConvertedModels, Layout, LayoutSource


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot be merged."""
    if stack.kind == "merged":
        return "it is already a merged decoder"
    if stack.kind != "pair":
        return "one graph serves the first and the later steps, so there is nothing to merge"
    first, later = unified_names(contract)
    for names in (first.inputs, later.inputs, first.outputs, later.outputs):
        if len(set(names.values())) < len(names):
            return "two of its inputs or outputs would get the same name: the contract does not distinguish them"
    return None


def make(source: LayoutSource) -> ConvertedModels:
    """Merge the two graphs of a pair."""
    first, later = source.halves
    names = unified_names(source.contract)
    made = ConvertedModels({}, (source.name("decoder"), source.name("decoder-with-past")))
    for half, chosen, is_later in ((first, names[0], False), (later, names[1], True)):
        name_half(half, source, is_later, chosen)
        if source.readable:
            name_axes(half.graph, chosen.axes, axis_names(source.contract))
    made.models[source.new_name(MERGED)] = merge_halves(source, first, later, find_kept(source.contract, *names), made)
    return made


LAYOUT = Layout("merged", "one file with an If on use_cache_branch", (MERGED,), refuse, make)
