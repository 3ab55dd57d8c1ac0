"""Fingerprints: what identifies a finding across runs.

The fingerprint lets a baseline, and code scanning, recognize a fault. It is made of what the fault is, and of nothing
that may change while the fault stays:

1. the name of its check;
2. the graph it is in: the *part* that the file plays, read from its graph (`merged`; `step` takes a past, `first-step`
   makes one, ...), the kind of the stack (merged, pair, ...), and how the weights of the file are stored (`float16`;
   `uint8` and MatMulNBits), which separates the variants of a model;
3. its `subject` (names of inputs, outputs, nodes, tensors), sorted; a file stands there as the part that it plays;
4. `Fault.apart` (an experiment, a target), where the subject does not separate two faults of one check.

So a fingerprint survives renamed or moved files, folders and stacks, other wording and numbers in a finding, another
severity, and another order of nodes or findings. It changes when the fault affects more or fewer layers, and when the
exporter renames nodes. A fault whose subject is a whole file (the runtime refuses it) has the fingerprint of every such
fault of that file.

Two findings of one model with the same fingerprint (two files with the same part and the same fault) are numbered by
the names of their stacks and files. The path of the model is not part of it: a baseline for several models adds it.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from kvdoctor.analysis.stacks import OnnxFile, StackFiles, takes_past
from kvdoctor.findings import Check, Fault, Finding
from kvdoctor.model.view import ELEMENT_TYPES, GraphView
from kvdoctor.records import record

FINGERPRINT_LENGTH = 16
"""Hexadecimal digits, that is 64 bits: enough that no two of some millions coincide by chance."""
PACKED = ("NBits", "Bnb4", "Quantize", "Integer", "QLinear")
"""Parts of the names of operators that compute with packed or rounded weights."""
NAMED_ALONE = ("encoder", "embedding", "other")
"""Roles of files that only their names identify."""


@record
class FindingOrigin:
    """Where a finding comes from: its file and its stack, None where it has none, and all files of the model."""

    file: OnnxFile | None = None
    stack: StackFiles | None = None
    files: tuple[OnnxFile, ...] = ()


def make_finding(one: Check, fault: Fault, origin: FindingOrigin) -> Finding:
    """The finding of a fault: with the code and name of its check, its stack and its fingerprint."""
    shared = {field.name for field in fields(Fault)} & {field.name for field in fields(Finding)}
    facts: dict[str, Any] = {name: getattr(fault, name) for name in shared}
    identity = compute_fingerprint(one.name, fault.subject, fault.apart, origin)
    if (run := fault.run) is not None:
        step = run.wrong_step
        facts |= {"experiment": run.experiment, "step": run.failed_step}
        facts |= {"past_length": step.past_length, "new_tokens": step.new_tokens} if step is not None else {}
    stack = origin.stack.name if origin.stack else None
    return Finding(code=one.code, name=one.name, stack=stack, fingerprint=identity, **facts)


def with_distinct_fingerprints(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings of one model, each with a fingerprint of its own."""
    by_name = sorted(range(len(findings)), key=lambda at: (findings[at].stack or "", findings[at].file or "", at))
    distinct = dict(zip(by_name, number_repeated([findings[at].fingerprint for at in by_name]), strict=True))
    return tuple(replace(finding, fingerprint=distinct[at]) for at, finding in enumerate(findings))


def compute_fingerprint(check: str, subject: Iterable[str], apart: Sequence[str], origin: FindingOrigin) -> str:
    """The fingerprint of one finding, by the rules above."""
    parts, view = {one.name: part_of(one) for one in origin.files}, origin.file.view if origin.file else None
    graph = [part_of(origin.file) if origin.file else "", origin.stack.kind if origin.stack else ""]
    if view is not None:  # how most weights are stored, and the operators that read packed or rounded ones
        graph += [_find_commonest_type(view), *sorted(op for op in view.operators if any(one in op for one in PACKED))]
    about = sorted(parts.get(name, name) for name in subject)
    return _digest(json.dumps([check, graph, about, [parts.get(name, name) for name in apart]]))


def number_repeated(fingerprints: Sequence[str]) -> list[str]:
    """The fingerprints without repetition: the second of two equal ones, and each later one, gets another value."""
    counts: Counter[str] = Counter()
    distinct = []
    for one in fingerprints:
        counts[one] += 1
        distinct.append(one if counts[one] == 1 else _digest(f"{one} {counts[one]}"))
    return distinct


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("ascii")).hexdigest()[:FINGERPRINT_LENGTH]


def part_of(file: OnnxFile) -> str:
    """The part that a file plays, by its graph alone."""
    if file.view is None or file.role in ("generator", "unreadable"):
        return file.role
    if takes_past(file.view):
        return "merged" if file.view.branches is not None else "step"
    return "beside" if file.role in NAMED_ALONE else "first-step"


def _find_commonest_type(view: GraphView) -> str:
    """The element type with the most weights."""
    sizes: Counter[str] = Counter()
    for tensor in view.model.graph.initializer:
        sizes[ELEMENT_TYPES.get(tensor.data_type, "")] += math.prod(tensor.dims)
    return min(sizes, key=lambda kind: (-sizes[kind], kind), default="")
