"""Pair: the two branches of a merged decoder in files of their own, as Optimum's decoder and decoder_with_past.

Requires: an `If` that is decided by an input. Ensures: no switch, no placeholders, no inputs that a half does not use;
the file with past does not return the cross-attention cache, which the caller holds.
"""

from kvdoctor.contract import CacheContract
from kvdoctor.layouts import Layout, Made, Source
from kvdoctor.layouts.joining import FIRST, LATER
from kvdoctor.layouts.naming import axis_names, first_of, name_axes, port_axes
from kvdoctor.layouts.unmerging import halves
from kvdoctor.report.document import Change
from kvdoctor.stacks import StackFiles


def refuses(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot be taken apart."""
    if stack.kind == "pair":
        return "it is a pair already"
    if stack.kind != "merged":
        return "one graph without a switch serves all steps: there are no two branches to take apart"
    return None if contract.slots else "its cache contract could not be read"


def make(source: Source) -> Made:
    """Take a merged decoder apart."""
    merged = source.model("decoder-merged")
    first, later = halves(merged, source.contract)
    made = Made({source.new_name(FIRST): first, source.new_name(LATER): later}, (source.name("decoder-merged"),))
    for file, half, branch in zip(made.models, (first, later), ("no-past branch", "cached branch"), strict=True):
        for part, mine, theirs in (
            ("inputs", half.graph.input, merged.graph.input),
            ("outputs", half.graph.output, merged.graph.output),
        ):
            kept = {value.name for value in mine}
            gone = [value.name for value in theirs if value.name not in kept]
            if gone:
                made.changes.append(Change(file, f"{branch}, {part}", first_of(gone), "left out"))
    if source.readable:
        axes = port_axes(source.contract, source.stack.main.name)
        for half in (first, later):
            name_axes(half.graph, axes, axis_names(source.contract))
    return made


LAYOUT = Layout("pair", "decoder_model.onnx and decoder_with_past_model.onnx", (FIRST, LATER), refuses, make)
