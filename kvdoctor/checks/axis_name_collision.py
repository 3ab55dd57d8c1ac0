"""One symbolic name stands for lengths that differ.

What it means: past and present of a growing slot carry the same axis name, although one is longer by the new tokens.
Runtimes may plan memory by these names (`Shape mismatch attempting to re-use buffer`), and loops that allocate by name
get buffers of the wrong size. A note: most runtimes only warn.

Reproduce: `kvdoctor inspect MODEL` shows both declarations.

Repair: rename the axis of the present, for instance to `past_sequence_length + sequence_length`.

Source: onnxruntime issue 21213.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, Fault, check


@check("KV113", "axis-name-collision", "contract")
def axis_name_collision(case: Case) -> Iterator[Fault]:
    """Growing slots whose present has the axis name of its past."""
    same = []
    for slot, past, present in case.pairs():
        if (
            slot.growth == "grow"
            and "past" in slot.axes
            and past.shape
            and present.shape
            and len(past.shape) == len(present.shape)
        ):
            axis = slot.axes.index("past")
            if isinstance(past.shape[axis], str) and past.shape[axis] == present.shape[axis]:
                same.append((past, present))
    if same:
        past, present = same[0]
        names = tuple(present.name for _, present in same)
        yield Fault(
            severity="note",
            file=case.decode_file,
            subject=names,
            where=f"output {first_and_count(names)}",
            promised=f"past {describe(past.dtype, past.shape)}",
            observed=f"present {describe(present.dtype, present.shape)}",
            cause="the present is longer than the past, yet both lengths have one name",
            advice=Advice("graph", "rename the axis of the present"),
        )
