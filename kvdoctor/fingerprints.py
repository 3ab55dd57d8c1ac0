"""The fingerprint of a finding: by it a baseline, and code scanning, know a fault again.

The rule. A fingerprint is made of what the fault is, and of nothing that may change while the fault stays:

1. the name of its check;
2. which graph of which kind of stack it stands in: the *part* that the file plays, told by its graph (`merged`; `step`
   takes a past, `first-step` makes one, ...), the kind of the stack (merged, pair, ...), and how the weights of the
   file are stored (`float16`; `uint8` and MatMulNBits), which tells the variants of a model apart;
3. what it is about: the finding's `subject` (names of inputs, outputs, nodes, tensors), sorted; a file is named there
   by the part that it plays;
4. where that does not tell two faults of one check apart, what does: `Fault.apart` (an experiment, a target).

So it survives other names and other places of files and folders, and with them of stacks, other words and numbers in
`where`, `promised`, `observed` and `cause`, another severity, and another order of nodes or findings. It changes when a
fault gets hold of more layers or loses some, and when the exporter gives nodes other names. A fault that only the whole
file stands for (the runtime refuses it) has the fingerprint of every such fault of that file.

Two findings of one model that are still alike (two files with the same part and the same fault) are numbered by their
stacks' and files' names. The path of the model is no part of it: a baseline for several models needs that as well.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # What reads graphs is loaded where a graph was read: a gate without changes needs none of it.
    from kvdoctor.graph import GraphView
    from kvdoctor.stacks import OnnxFile, StackFiles

LENGTH = 16
"""Hexadecimal digits: 64 bits, so that chance makes no two of some millions alike."""

PACKED = ("NBits", "Bnb4", "Quantize", "Integer", "QLinear")
"""Parts of the names of operators that compute with packed or rounded weights."""

BESIDE = ("encoder", "other")
"""Files that are told apart by their names alone."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding stands: its file and its stack, as far as it has them, and all files of the model."""

    file: "OnnxFile | None"
    stack: "StackFiles | None"
    files: "tuple[OnnxFile, ...]"


def fingerprint(check: str, subject: Iterable[str], apart: Sequence[str], place: Place) -> str:
    """The fingerprint of one finding, as the rule above says."""
    parts = {one.name: part_of(one) for one in place.files}
    stands = [
        part_of(place.file) if place.file else "",
        place.stack.kind if place.stack else "",
        *(_weights(place.file) if place.file else ()),
    ]
    about = sorted(parts.get(name, name) for name in subject)
    identity = json.dumps([check, stands, about, [parts.get(name, name) for name in apart]])
    return hashlib.sha256(identity.encode("ascii")).hexdigest()[:LENGTH]


def numbered(fingerprints: Sequence[str]) -> list[str]:
    """Fingerprints, each of which stands once: the second of two that are alike, and those after it, get others."""
    seen: Counter[str] = Counter()
    distinct = []
    for one in fingerprints:
        seen[one] += 1
        again = f"{one} {seen[one]}".encode("ascii")
        distinct.append(one if seen[one] == 1 else hashlib.sha256(again).hexdigest()[:LENGTH])
    return distinct


def part_of(file: "OnnxFile") -> str:
    """The part that a file plays, by its graph alone."""
    from kvdoctor.stacks import takes_past

    if file.view is None or file.role in ("generator", "unreadable"):
        return file.role
    if takes_past(file.view):
        return "merged" if file.view.branches is not None else "step"
    return "beside" if file.role in BESIDE else "first-step"


def _weights(file: "OnnxFile") -> list[str]:
    """How most weights are stored, and the operators that take them so."""
    if file.view is None:
        return []
    return [_stored(file.view), *sorted(op for op in file.view.operators if any(word in op for word in PACKED))]


def _stored(view: "GraphView") -> str:
    from kvdoctor.graph import ELEMENT_TYPES

    sizes: Counter[str] = Counter()
    for tensor in view.model.graph.initializer:
        count = 1
        for size in tensor.dims:
            count *= size
        sizes[ELEMENT_TYPES.get(tensor.data_type, "")] += count
    return min(sizes, key=lambda kind: (-sizes[kind], kind), default="")
