"""What templates of compiled languages ask of a plan, so that a project has only the code that its plan needs."""

import re
from collections.abc import Callable, Iterator

from kvdoctor.loops.plan import CallPlan, Input, LoopPlan, SlotPlan

Value = Callable[[Input, LoopPlan], str]
"""How a language makes the tensor of an input."""


def is_fed_zeros(slot: SlotPlan, plan: LoopPlan) -> bool:
    """Whether the loop makes a slot's first value: the first call takes it, or nothing else makes it, or it grows."""
    return not slot.by_encoder and (slot.past in plan.prefill.pasts or slot.made is None or slot.copies)


def fills(plan: LoopPlan) -> bool:
    """Whether the loop makes the first value of some slot."""
    return any(is_fed_zeros(slot, plan) for slot in plan.slots)


def follows(plan: LoopPlan, *rules: str) -> bool:
    """Whether some input follows one of the rules."""
    return not plan.rules.isdisjoint(rules)


def takes_other_outputs(plan: LoopPlan) -> bool:
    """Whether the first call returns some part of the cache under another name than the later ones."""
    return any(slot.made != slot.present for slot in plan.slots)


def source_axis(plan: LoopPlan) -> int:
    """The axis of a source along which its length counts; the second one where none is named so."""
    dims = plan.source.dims if plan.source else ()
    return next((i for i, dim in enumerate(dims) if dim in ("encoder", "encoder_input")), 1)


def words_of(call: CallPlan, plan: LoopPlan, value: Value) -> frozenset[str]:
    """The words in the expressions of a call's inputs: a compiler warns of a local variable that none of them uses."""
    made = [
        value(one, plan) for one in call.inputs if one.rule not in ("encoder-states", "encoder-input", "embeddings")
    ]
    return frozenset(re.findall(r"\w+", " ".join(made)))


def nul_in(plan: LoopPlan) -> str | None:
    """The first name of a model that has a NUL, which ends a name in the C interface of the runtime."""
    return next((name for name in _names(plan) if "\0" in name), None)


def _names(plan: LoopPlan) -> Iterator[str]:
    for call in plan.calls:
        yield call.file
        yield from (one.name for one in call.inputs)
        yield from call.pasts
        yield from call.outputs
    for slot in plan.slots:
        yield from (name for name in (slot.past, slot.present, slot.made) if name is not None)
