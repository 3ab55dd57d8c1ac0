"""The report of a diagnosis: what is known of its files and stacks, the findings, and the ground of the verdict.

The ground: the pasts, new tokens, rows and lengths of the runs that passed, and what is proved.
"""

import contextlib
import math
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvdoctor.analysis.completeness import is_cacheless
from kvdoctor.analysis.configs import SideCars, declared_windows, encoder_length
from kvdoctor.analysis.memory import Workload, plan_memory
from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.proof import Proof
from kvdoctor.analysis.stacks import OnnxFile, StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import PAGED_LOOP, Run
from kvdoctor.diagnose.context import RunContext
from kvdoctor.diagnose.run_checks import CheckResults, with_distinct_fingerprints
from kvdoctor.errors import describe_crash
from kvdoctor.findings import Finding, NotChecked
from kvdoctor.model.files import sha256
from kvdoctor.model.proto import onnx_version
from kvdoctor.model.traverse import STANDARD
from kvdoctor.model.view import ELEMENT_TYPES, Declared, GraphView
from kvdoctor.options import Options
from kvdoctor.report.document import Report, decide, worst_first
from kvdoctor.report.facts import FileFacts, GraphFacts, Ground, ModelFacts, StackFacts
from kvdoctor.report.known_messages import find_issues
from kvdoctor.runtime.targets.limits import find_oldest

ON_TARGETS = "KV4"
"""How the codes of checks on target runtimes begin."""


def build_report(
    command: str, folder: ModelFolder, options: Options, results: CheckResults, stacks: list[StackFacts]
) -> Report:
    """The report on a model. What runs could have confirmed, and did not, is at most a warning."""
    open_stacks = {entry.stack for entry in results.not_checked if entry.essential}
    found = [f if command == "inspect" or f.stack in open_stacks else _weaken(f) for f in results.findings]
    findings = with_distinct_fingerprints(worst_first([_with_issues(finding, folder) for finding in found]))
    verdict = decide(command, findings, results.not_checked, options.fail_on)
    # There is no verdict where no stack that was read is a decoder with a KV cache.
    none = all(stack.contract is not None and stack.contract.no_decoder for stack in stacks)
    none = none if stacks else any(map(is_cacheless, folder.files)) or {f.role for f in folder.files} == {"encoder"}
    return Report(
        command=command,
        arguments=options.as_arguments(),
        seed=options.seed,
        verdict="not-applicable" if none and verdict == "incomplete" else verdict,
        environment=environment(),
        model=ModelFacts(folder.shown, tuple(file_facts(file, options.hash) for file in folder.files)),
        stacks=tuple(stacks),
        findings=findings,
        not_checked=results.not_checked,
        notes=tuple(_list_notes(folder)),
    )


def _weaken(finding: Finding) -> Finding:
    """A suspected error as a warning, unless it is one of a whole file or of a target, which no run may decide."""
    unproved = finding.confidence == "suspected" and finding.severity == "error"
    runs_decide = finding.stack is not None and not finding.code.startswith(ON_TARGETS)
    return replace(finding, severity="warning") if unproved and runs_decide else finding


def _with_issues(finding: Finding, folder: ModelFolder) -> Finding:
    views = [file.view for file in folder.files if file.view is not None and finding.file in (None, file.name)]
    operators = {name for view in views for name in view.operators}
    producer = " ".join(view.producer or "" for view in views)
    return replace(finding, issues=find_issues(finding, operators, producer))


def _list_notes(folder: ModelFolder) -> Iterator[str]:
    yield from folder.side_cars.problems
    for stack in folder.stacks:
        yield from stack.remarks
    used = {file.name for stack in folder.stacks for file in stack.members}
    used |= {problem.subject for stack in folder.stacks for problem in stack.problems}
    for file in folder.files:
        if folder.stacks and file.name not in used and file.role != "unreadable":
            role = f" ({file.role})" if file.role != "other" else ""
            yield f"{file.name} was skipped: it is not part of a decoder with a cache{role}"


def environment() -> dict[str, str]:
    """Versions that a report depends on."""
    machine = f"{sys.platform} {platform.machine()}"
    return {"onnx": onnx_version(), "python": platform.python_version(), "platform": machine}


def file_facts(file: OnnxFile, hash_it: bool) -> FileFacts:
    """One file as the report shows it; `hash_it` reads every byte of it."""
    size = file.skeleton.bytes_on_disk if file.skeleton else 0
    if file.skeleton is None:
        with contextlib.suppress(OSError):
            size = file.path.stat().st_size
    digest = sha256(file.path) if hash_it and file.path.is_file() else None
    if file.view is None:
        return FileFacts(file.name, file.role, size, digest)
    view, oldest = file.view, find_oldest(file.view)
    return FileFacts(
        path=file.name,
        role=file.role,
        bytes=size,
        sha256=digest,
        ir_version=view.model.ir_version,
        opsets=view.opsets,
        producer=view.producer,
        external=tuple(external.location for external in file.external),
        inputs=tuple(_port_facts(port) for port in view.inputs.values()),
        outputs=tuple(_port_facts(port) for port in view.outputs.values()),
        graph=_graph_facts(view),
        oldest_runtime=oldest.release if oldest else None,
        oldest_because=(oldest.because or None) if oldest else None,
    )


def _graph_facts(view: GraphView) -> GraphFacts:
    graphs = [scope.graph for scope in view.scopes()]
    nodes = [node for body in (*graphs, *view.model.functions) for node in body.node]
    named = ((f"{node.domain}." if node.domain not in STANDARD else "") + node.op_type for node in nodes)
    operators = Counter(map(str, named))
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    size = sum(_bits(tensor.data_type) * math.prod(tensor.dims) for tensor in tensors)
    return GraphFacts(operators.total(), dict(sorted(operators.items())), len(tensors), math.ceil(size / 8))


def _bits(data_type: int) -> int:
    """Bits of an element, by the digits of its type's name: uint4, bfloat16, float8e4m3fn; 0 where it has no size."""
    name = ELEMENT_TYPES.get(data_type, "")
    known = {"float": 32, "double": 64, "bool": 8}
    digits = re.search(r"\d+", name)
    return known.get(name) or (int(digits.group()) if digits else 0)


def _port_facts(port: "Declared") -> dict[str, Any]:
    return {"name": port.name, "dtype": port.dtype, "shape": None if port.shape is None else list(port.shape)}


def stack_facts(
    stack: StackFiles, contract: CacheContract, side_cars: SideCars, load: Workload | None = None
) -> StackFacts:
    """One stack as the report shows it, its cache planned for a load."""
    names = tuple(file.name for file in stack.members)
    cache = plan_memory(contract, load, encoder_length(side_cars.config), declared_windows(side_cars.config))
    return StackFacts(stack.name, contract.layout, names, contract, cache)


LEAST = 16
"""Tokens without which no model is called healthy that takes more."""


def find_ground(runs: Iterable[Run], contracts: Mapping[str, CacheContract], sides: tuple[str, ...]) -> Ground | None:
    """What the runs that passed went over; of several stacks the fewest tokens. None where none passed."""
    passed = [run for run in runs if run.shows == "passed" and run.steps]
    steps = [(step, contracts[run.stack]) for run in passed for step in run.steps if step.phase != "reference"]
    if not steps:
        return None
    pasts, stacks = [step.past_length for step, _ in steps], {run.stack for run in passed}
    chunks = tuple(sorted({step.new_tokens for step, _ in steps if step.past_length}))
    rows = set()
    for step, contract in steps:
        first = (port.name for port in contract.graph("decode").inputs if port.axes[:1] == ("batch",))
        rows |= {step.fed[name].shape[0] for name in [name for name in first if name in step.fed][:1]}
    tokens = min(_count_tokens(run for run in passed if run.stack == stack) for stack in stacks)
    return Ground(pasts=(min(pasts), max(pasts)), chunks=chunks, batch=tuple(sorted(rows)), tokens=tokens, sides=sides)


def find_proof(stack: StackFiles, contract: CacheContract) -> Proof | None:
    """What the graph alone decides about a stack; None where it is no decoder."""
    # Loaded here: most commands ask for no proof.
    from kvdoctor.analysis.proof.prove import prove

    try:
        return prove(stack, contract)
    except Exception as error:  # an error of kvdoctor here must not cost what files and runs show
        return Proof(exceptions=(describe_crash("the proof", error),))


def without_faults(proof: Proof | None, stack: str, findings: Iterable[Finding]) -> Proof | None:
    """A proof to report; None where it holds of a stack that has an error."""
    faulty = any(one.severity == "error" and one.stack in (stack, None) for one in findings)
    return None if proof is None or (proof.holds and faulty) else proof


def sum_up_proofs(stacks: Iterable[StackFacts]) -> dict[str, Any] | None:
    """What is proved of all stacks: the least lengths, and all exceptions. None where one was not tried."""
    proofs = [stack.proof for stack in stacks]
    if not proofs or None in proofs:
        return None
    known = [proof for proof in proofs if proof is not None]
    limits = [proof.up_to for proof in known if proof.up_to is not None]
    left = dict.fromkeys(reason for proof in known for reason in proof.exceptions)
    return {"up_to": min(limits, default=None), "except": list(left)}


def find_short_ground(context: RunContext) -> Iterator[NotChecked]:
    """A loop that passed, where no sequence was long: that is no health, unless the model takes no more tokens."""
    loop, contract = context.checked_loop, context.contract
    if loop is None or loop.shows != "passed" or loop.experiment == PAGED_LOOP or contract.frozen_past is not None:
        return
    tokens = _count_tokens(run for run in context.runs if run.shows == "passed")
    # A buffer that no attention reads is no cache with a place for each token.
    attended = contract.context_limit is not None or contract.of_kind("self-attention")
    limit = contract.usable_length if attended else None
    if tokens < LEAST and (limit is None or limit >= LEAST):
        reason = f"the longest run that passed has {tokens} tokens; a verdict needs one of {LEAST}"
        yield NotChecked(context.stack.name, "KV301", reason, essential=True)


def _count_tokens(runs: Iterable[Run]) -> int:
    return max((step.past_length + step.new_tokens for run in runs for step in run.steps), default=0)
