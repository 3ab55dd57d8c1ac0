"""What layouts of two graphs have in common: halves under names on which they agree, and their merger."""

from kvdoctor.contract import CacheContract
from kvdoctor.layouts import DoesNotFit, Made, Source
from kvdoctor.layouts.merging import SWITCH, Merging, merge
from kvdoctor.layouts.naming import Names, first_of, rename_as, unnamed_inputs
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.report.document import Change

MERGED, FIRST, LATER, ENCODER, SINGLE = (
    "decoder_model_merged",
    "decoder_model",
    "decoder_with_past_model",
    "encoder_model",
    "model",
)
"""The stems of Optimum's file names."""


def name_half(model: ModelProto, source: Source, later: bool, names: Names) -> None:
    """Give one half of a pair those names.

    Raises:
        DoesNotFit: it needs an input that has none of them.
    """
    phase, role = ("decode", "decoder-with-past") if later else ("prefill", "decoder")
    graph = source.contract.graph(phase)  # type: ignore[arg-type]
    rename_as(model, names)
    if strange := unnamed_inputs(model, graph, names):
        listed = first_of(f"{port.name} ({port.role})" for port in strange)
        raise DoesNotFit(f"{source.name(role)} needs {listed}, which the new layout has no name for")  # type: ignore[arg-type]


def held(contract: CacheContract, first: Names, later: Names) -> dict[str, str]:
    """For outputs of the first step that later steps need not compute: the pasts that hold their values."""
    pairs = {}
    for slot in contract.slots:
        if slot.growth == "constant" and slot.filled_by is not None:
            pairs[first.outputs.get(slot.filled_by, slot.filled_by)] = later.inputs.get(slot.past, slot.past)
    return pairs


def joined(source: Source, first: ModelProto, later: ModelProto, passed: dict[str, str], made: Made) -> ModelProto:
    """The merged decoder of two halves that agree on their names, and what to say of it."""
    if any(value.name == SWITCH for half in (first, later) for value in half.graph.input):
        raise DoesNotFit(f"an input of the pair is called {SWITCH!r}, as the switch of a merged decoder")
    work = Merging(source.root, passed)
    returned = {value.name for value in later.graph.output}
    merged = merge(first, later, work)
    file = source.new_name(MERGED)
    names = f"{source.name('decoder')} and {source.name('decoder-with-past')}"
    made.changes.append(Change(file, "main graph", names, f'one If on "{SWITCH}"; {work.shared} weights shared'))
    through = [name for name in passed if name not in returned and name in {o.name for o in merged.graph.output}]
    if through:
        made.changes.append(
            Change(file, "cached branch", "does not return " + first_of(through), "Identity of the past")
        )
    if work.dropped:
        made.changes.append(Change(file, "outputs", first_of(work.dropped), "left out: only one of the graphs has it"))
    return merged
