"""What findings say of the place of a fault: the words that checks of bad runs share."""

from kvdoctor.case import Case
from kvdoctor.contract import describe
from kvdoctor.trace import Place, Run

MOST_SHOWN = 3
MOST_LINES = 2


def node_words(place: Place) -> str:
    """The node with the branches and functions around it."""
    assert place.node is not None  # noqa: S101 - asked only of places that have one
    inside = f" in {place.scope}" if place.scope else ""
    return f'{place.node.op} "{place.node.name}"{inside}'


def because(run: Run | None) -> tuple[str, ...]:
    """Where and why a run fails or parts from the run without a cache, then where it came from: three lines at most."""
    place = run.place if run is not None else None
    if run is None or place is None:
        return ()
    if run.outcome == "failed":
        came = [f"{name} {describe(seen.dtype, seen.shape)}" for name, seen in place.shapes.items()][:MOST_SHOWN]
        into = f"into it came {', '.join(came)}: " if came else ""
        return (f"{into}{place.words}", *place.provenance[:MOST_LINES])
    layer = f"layer {place.layer}, " if place.layer is not None and place.node is not None else ""
    parts = f"the runs part in {layer}{node_words(place)}: " if place.node is not None else ""
    return (f"{parts}{place.words}", *place.provenance[: MOST_LINES - 1])


def placed(case: Case) -> Run | None:
    """The run whose place was looked for: the judged one, or the first of those with other sizes."""
    return next((run for run in (case.judged, *case.runs) if run is not None and run.place is not None), None)
