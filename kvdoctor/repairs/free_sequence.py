"""Frees the number of new tokens, where it is declared or baked into the graph as a number.

Requires: `sequence-axis-frozen`, in a graph whose numbers tell which of them stand for it: where, at any other
length, something could not be added, joined or reshaped. Values that were computed for the length of the trace (rows of
a table of positions, distances) must not be folded into it: what they were computed from is not in the file.
Ensures: inputs and outputs declare the length by a name; the numbers that stood for it are computed from the shapes of
the inputs; at the length of the trace every output is what it was, bit for bit.
"""

from kvdoctor.patient import Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change
from kvdoctor.sizing.axes import freed


def apply(patient: Patient) -> tuple[Change, ...]:
    """Free the new tokens in the graphs that take one number of them."""
    return freed(patient, "sequence-axis-frozen", "new")


REPAIR = Repair(
    name="free-sequence",
    mends=("sequence-axis-frozen",),
    stage="axes",
    keeps="sizes",
    apply=apply,
    advice=("Without a change to the model: only steps with a past of that very length can be run.",),
)
