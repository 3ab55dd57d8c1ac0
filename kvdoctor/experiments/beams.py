"""A beam search: rows of the cache are put in another order between two steps."""

from kvdoctor.calls import Scenario
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.experiments.loops import takes_any_batch
from kvdoctor.feeds import Deal

ORDER = (2, 0, 0)
"""Which row each beam goes on from: none stays, one is dropped, one comes twice."""


def reorder(deal: Deal) -> Calls:
    """Three beams; after one step each goes on from another row, and must give that row's logits."""
    expected = yield from deal.whole()
    start, total = deal.scenario.prompt, deal.scenario.total
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    answer = yield deal.decode(start, start + 1, past, expected[:, start : start + 1])
    unmoved = deal.carry(past, answer, "held")
    past, moved, expected = deal.reordered(unmoved, ORDER), deal.rows(ORDER), expected[deal.of_rows(ORDER)]
    for position in range(start + 1, total):
        answer = yield moved.decode(position, position + 1, past, expected[:, position : position + 1])
        past = moved.carry(past, answer, "held")
    wanted = expected[:, start + 1 : start + 2]
    yield moved.decode(start + 1, start + 2, unmoved, wanted, kind="control", label="a cache left in its order")


EXPERIMENTS = (
    Experiment(
        "beam-reorder",
        "the held loop with three beams whose cache is reordered after a step",
        reorder,
        Scenario(batch=len(ORDER), steps=3),
        takes_any_batch,
        changes_deal=True,
        order=7,
    ),
)
