"""The ground of a verdict: the pasts, new tokens, rows and lengths of the runs that passed, and what is proved."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvdoctor.analysis.proof import Proof
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import PAGED_LOOP, Run, Step
from kvdoctor.diagnose.context import RunContext
from kvdoctor.errors import describe_crash
from kvdoctor.findings import Finding, NotChecked
from kvdoctor.report.facts import Ground, StackFacts

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
    batch = tuple(sorted({rows for step, contract in steps for rows in _rows_of(step, contract)}))
    tokens = min(_count_tokens(run for run in passed if run.stack == stack) for stack in stacks)
    return Ground(pasts=(min(pasts), max(pasts)), chunks=chunks, batch=batch, tokens=tokens, sides=sides)


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
        reason = f"no run that passed goes beyond {tokens} tokens, where the model may take more"
        yield NotChecked(context.stack.name, "KV301", reason, essential=True)


def _count_tokens(runs: Iterable[Run]) -> int:
    return max((step.past_length + step.new_tokens for run in runs for step in run.steps), default=0)


def _rows_of(step: Step, contract: CacheContract) -> set[int]:
    """The rows that a call was fed, by the first input that has them."""
    ports = [port for port in contract.graph("decode").inputs if port.axes[:1] == ("batch",) and port.name in step.fed]
    return {step.fed[port.name].shape[0] for port in ports[:1]}
