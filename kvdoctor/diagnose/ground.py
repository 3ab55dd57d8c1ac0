"""The ground of a verdict: the pasts, new tokens, rows and lengths of the runs that passed."""

from collections.abc import Iterable, Iterator, Mapping

from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import PAGED_LOOP, Run, Step
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import NotChecked
from kvdoctor.report.facts import Ground

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
