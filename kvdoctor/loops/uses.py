"""What a loop may offer beside one sequence, token by token: what no run of the model showed to be wrong."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvdoctor.decode.runs import WRONG, Run
from kvdoctor.loops.plan import LoopPlan
from kvdoctor.records import record


@record
class OfferedUse:
    """A use that a loop offers.

    Attributes:
        words: The use, as it begins a sentence.
        experiments: Those that try it; one that goes wrong takes it out of the loop.
        offered: Whether a plan has it.
        without: The plan without it.
        instead: What the loop does then.
        must_pass: Offered only where an experiment showed that it is right, and not where none could be run.
    """

    words: str
    experiments: tuple[str, ...]
    offered: Callable[[LoopPlan], bool]
    without: Callable[[LoopPlan], LoopPlan]
    instead: str
    must_pass: bool = False


USES = (
    OfferedUse(
        "several sequences at once",
        ("batch", "batch-rows"),
        lambda plan: plan.batch is None,
        lambda plan: replace(plan, batch=1, pads=False),
        "the loop takes one sequence",
    ),
    OfferedUse(
        "prompts of unequal length",
        ("left-padding",),
        lambda plan: plan.pads,
        lambda plan: replace(plan, pads=False),
        "the prompts of a batch must have the same length",
        must_pass=True,
    ),
    OfferedUse(
        "several new tokens on top of a cache",
        ("chunk", "second-turn"),
        lambda plan: plan.chunks,
        lambda plan: replace(plan, chunks=False),
        "a step takes one token",
    ),
    OfferedUse(
        "steps taken back",
        ("rewind",),
        lambda plan: plan.rewinds,
        lambda plan: replace(plan, rewindable=False),
        "the loop cannot go back",
    ),
    OfferedUse(
        "rows in another order",
        ("beam-reorder",),
        lambda plan: plan.reorders,
        lambda plan: replace(plan, reorderable=False),
        "the loop does not change rows",
    ),
)

EXPERIMENTS = tuple(name for use in USES for name in use.experiments)


def without_wrong_uses(plan: LoopPlan, runs: Mapping[str, Run]) -> tuple[LoopPlan, tuple[str, ...]]:
    """The plan without the uses that went wrong in a run, and a remark on each."""
    remarks = []
    for use in USES:
        if not use.offered(plan):
            continue
        outcomes = {name: runs[name].outcome for name in use.experiments if name in runs}
        wrong = next((name for name, outcome in outcomes.items() if outcome in WRONG), None)
        if wrong is not None:
            remarks.append(f"{use.words}: wrong with this model (experiment {wrong}); {use.instead}")
        if wrong is not None or (use.must_pass and "passed" not in outcomes.values()):
            plan = use.without(plan)
    return plan, tuple(remarks)
