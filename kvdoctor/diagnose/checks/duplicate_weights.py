"""One file stores byte-identical weights more than once.

What it means: merging two branches, quantizing tied weights, or exporting a subgraph with its own copies makes a file
larger than its weights, and the runtime loads every copy.

How it is decided: tensors of the same type and shape with the same first bytes are compared completely. Vectors that
repeat one number, such as freshly initialized norms, do not count, nor do copies that together take less than 1 % of
the weights.

Reproduce: `kvdoctor step-test MODEL`, or `inspect MODEL --weights`, names the copies and their size in bytes.

Repair: export again, or merge the branches with a tool that moves shared weights out of them. Scales and weights of
quantized MatMuls must stay next to their node.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.diagnose.context import FileContext, RunContext
from kvdoctor.errors import CannotCheck, UnreadableError
from kvdoctor.findings import Fault, Faults, check
from kvdoctor.model.external_data import read_reference
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.view import GraphView
from kvdoctor.model.weights import Weight
from kvdoctor.report.wording import format_count, shorten_names

SMALLEST = 4096
"""Bytes: smaller copies cost nothing."""
WORTH_SAYING = 0.01
HEAD = 4096


@check("KV502", "duplicate-weights", "runs")
def duplicate_weights(context: RunContext) -> Faults:
    """One fault for each file: all its copies."""
    for file in context.stack.members:
        yield from _find_copies(file, context)


@check("KV502", "duplicate-weights", "file")
def duplicate_weights_of_file(context: FileContext) -> Faults:
    """The same in an inspection that may read weights."""
    if context.weights:
        yield from _find_copies(context.file, context)


def _find_copies(file: OnnxFile, context: RunContext | FileContext) -> Faults:
    try:
        weights = list(_list_weights(file))
        copies = [same for same in group_equal(weights).values() if len(same) > 1]
    except (OSError, UnreadableError) as error:
        raise CannotCheck(f"{file.name} could not be read again: {error}") from None
    wasted = sum(weight.length for same in copies for weight in same[1:])
    if wasted <= WORTH_SAYING * sum(weight.length for weight in weights):
        return
    subject = tuple(weight.name for same in copies for weight in same)
    count = format_count(len(copies), "weight")
    advice = "or export again, or move weights that two branches share into the graph around them"
    cause = "byte-identical weights are stored more than once"
    fault = Fault("note", subject, cause, context.advise_graph_repair(advice), file=file.name)
    observed = f"{shorten_names(subject)} store {count}; the copies take {wasted:,} bytes"
    yield fault.compare("each weight stored once", observed).also(where=f"initializers of {file.name}")


def _list_weights(file: OnnxFile) -> Iterator[Weight]:
    """The large initializers of a file, at any depth."""
    places = {found.location: found.path for found in file.external if found.bytes is not None}
    if file.external_problems:
        return
    for scope in GraphView(read_skeleton(file.path, located=True).model).scopes():
        for tensor in scope.graph.initializer:
            if (weight := locate_weight(tensor, {**places, file.path.name: file.path})) is not None:
                yield weight


def locate_weight(tensor: TensorProto, places: dict[str, Path]) -> Weight | None:
    """Where the bytes of a large initializer lie, by the files that locations name; None for a small one."""
    reference = read_reference(tensor)
    path = places.get(reference.location) if reference is not None else None
    if reference is None or path is None or reference.length < SMALLEST:
        return None
    return Weight(tensor.name, tensor.data_type, tuple(tensor.dims), reference.length, path, reference.offset)


def group_equal(weights: list[Weight]) -> dict[bytes, list[Weight]]:
    """Weights by content, of those that share type, shape and first bytes with another."""
    heads: dict[tuple[object, ...], list[Weight]] = {}
    for weight in weights:
        head = next(weight.read(HEAD), b"")
        if any(head[at : at + 4] != head[:4] for at in range(4, len(head), 4)):
            heads.setdefault((weight.data_type, weight.dims, head), []).append(weight)
    found: dict[bytes, list[Weight]] = {}
    for group in heads.values():
        for weight in group if len(group) > 1 else ():
            digest = hashlib.sha256(repr((weight.data_type, weight.dims)).encode())
            for part in weight.read():
                digest.update(part)
            found.setdefault(digest.digest(), []).append(weight)
    return found
