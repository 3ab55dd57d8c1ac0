"""Rows of a batch in a decode step: what one of them learns of the other."""

from typing import Any

import numpy as np

from kvdoctor.calls import Past, Scenario, as_array
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Decision, Experiment
from kvdoctor.experiments.loops import takes_any_batch
from kvdoctor.experiments.rows import other_token, probe, same_logits
from kvdoctor.feeds import Deal
from kvdoctor.trace import Cause


def why_batch(deal: Deal) -> Decision:
    """Noise in the cache of one row, of each kind in turn, must not change the logits of the other."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    answer = yield probe(deal.prefill(start))
    if answer.failed:
        return None
    past = deal.carry(None, answer, "held")
    step = yield probe(deal.decode(start, start + 1, past))
    if step.failed:
        return None
    for row in (0, 1):
        other = 1 - row
        for kind in dict.fromkeys(slot.kind for slot in deal.contract.slots if "batch" in slot.axes):
            changed = yield probe(deal.decode(start, start + 1, _noisy(deal, past, kind, row)))
            if not changed.failed and not same_logits(changed.logits[[other]], step.logits[[other]], exactness):
                return Cause(
                    "batch-rows-interact",
                    f"in a step on a past of {start}, row {other}'s logits change with the {kind} cache of row {row}",
                )
        changed = yield probe(other_token(deal, start, row * deal.contract.codebooks).decode(start, start + 1, past))
        if not changed.failed and not same_logits(changed.logits[[other]], step.logits[[other]], exactness):
            return Cause(
                "batch-rows-interact",
                f"in a step on a past of {start}, row {other}'s logits change with the token of row {row}",
            )
    return None


def _noisy(deal: Deal, past: Past, kind: str, row: int) -> Past:
    """The past with noise in one row of the slots of a kind."""
    changed: dict[str, Any] = dict(past)
    rng = np.random.default_rng(13)
    for slot in deal.contract.of_kind(kind):
        if "batch" not in slot.axes:
            continue
        tensor = as_array(past[slot.past]).copy()
        at = (slice(None),) * slot.axes.index("batch") + (row,)
        noise = rng.standard_normal(tensor[at].shape) * max(float(np.std(tensor.astype(np.float64))), 1e-3)
        tensor[at] = noise.astype(tensor.dtype)
        changed[slot.past] = tensor
    return Past(changed, past.length)


def has_two_rows(contract: CacheContract) -> str | None:
    """Two rows must fit, and nothing may be rounded by a scale that they share."""
    if contract.exactness == "dynamic-quantisation":
        return "dynamic quantisation takes one scale from all rows"
    return takes_any_batch(contract)


EXPERIMENTS = (
    Experiment(
        "why-batch",
        "what a row of a batch learns of the other one in a step",
        why_batch,
        Scenario(batch=2),
        has_two_rows,
        judged=False,
        shown=False,
        asks_why=("batch",),
        order=41,
    ),
)
