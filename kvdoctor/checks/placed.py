"""What findings say of the place of a fault: the words that checks of bad runs share."""

from kvdoctor.contract import describe
from kvdoctor.trace import Place, Run

MOST_SHOWN = 3
MOST_LINES = 2


def node_words(place: Place) -> str:
    """The node with the branches and functions around it."""
    assert place.node is not None  # noqa: S101 - asked only of places that have one
    inside = f" in {place.scope}" if place.scope else ""
    return f'{place.node.op} "{place.node.name}"{inside}'


def because(run: Run) -> tuple[str, ...]:
    """What came into the node and why that goes wrong, then where it came from: at most three lines."""
    place = run.place
    if place is None:
        return ()
    came = [f"{name} {describe(seen.dtype, seen.shape)}" for name, seen in place.shapes.items()][:MOST_SHOWN]
    into = f"into it came {', '.join(came)}: " if came else ""
    return (f"{into}{place.words}", *place.provenance[:MOST_LINES])


def layer_words(place: Place) -> str:
    """The layer, where it is known: `layer 1, `."""
    return f"layer {place.layer}, " if place.layer is not None else ""
