"""Shared: a pair whose graphs read the same weights from one data file, in which each stands once.

Requires: two files of one stack with weights of equal content.
Ensures: the graphs are unchanged; tensors of equal type, shape and content refer to the same bytes of the data file.
What is smaller than 64 bytes stays inside the files, where shape inference looks for it.
"""

from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.model.external_data import external_tensors
from kvdoctor.repair.layouts.registry import ConvertedModels, DoesNotFit, Layout, LayoutSource
from kvdoctor.repair.layouts.weights import LINE, EqualTensors, FileSizeLimit, TensorBytes, point, restore, span_of
from kvdoctor.report.repair_record import Change

BESIDE = FileSizeLimit(most=0)
"""No file holds its weights."""


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:  # noqa: ARG001 - the files alone decide
    """Why a stack has no weights to share."""
    return None if stack.kind == "pair" else "it is one file, which has nothing to share with another"


def make(source: LayoutSource) -> ConvertedModels:
    """Let both graphs refer to the same bytes."""
    names = (source.name("decoder"), source.name("decoder-with-past"))
    made = ConvertedModels(dict(zip(names, source.halves, strict=True)), names, limit=BESIDE)
    for model in made.models.values():
        for tensor in [*external_tensors(model)]:
            if span_of(tensor).length < LINE:
                restore(tensor, source.root)
    kept = {name: [*external_tensors(model)] for name, model in made.models.items()}
    sameness = EqualTensors(source.root, (tensor for tensors in kept.values() for tensor in tensors))
    places: dict[tuple[object, ...], TensorBytes] = {}
    for name, tensors in kept.items():
        shared = []
        for tensor in tensors:
            own = span_of(tensor)
            place = places.setdefault(sameness.key(tensor), own)
            if place != own:
                point(tensor, place)
                shared.append(own.length)
        if shared:
            counted = f"{len(shared)} weights, {sum(shared)} bytes"
            made.changes.append(Change(name, counted, "stored again", f"read from {names[0]}_data"))
    if not made.changes:
        first, later = ({span_of(tensor) for tensor in tensors} for tensors in kept.values())
        already = "its files share their weights already"
        raise DoesNotFit(already if first & later else "no weight of one file has the content of one in the other")
    made.notes.append(f"Keep {names[0]}_data beside both files: neither opens without it.")
    return made


LAYOUT = Layout("shared", "a pair whose weights are stored once, in a data file of both graphs", (), refuse, make)
