"""One symbolic name stands for lengths that differ.

What it means: past and present of a growing slot carry the same axis name, although one is longer by the new tokens; or
shapes declared inside the graph do. Runtimes plan memory by these names, and loops that allocate by name get buffers of
the wrong size. A note where the runs pass. An error where a step fails, and passes once the runtime reuses no buffers.

Reproduce: `kvdoctor inspect MODEL` shows both declarations; open a session with `enable_mem_reuse = False`.

Repair: rename the axis of the present, for instance to `past_sequence_length + sequence_length`; delete the shapes that
are declared inside the graph (`value_info`), which no runtime needs.

Source: onnxruntime issue 21213.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import describe
from kvdoctor.findings import Fault, check
from kvdoctor.trace import Run


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
    run = case.judged
    if run is not None and run.passes_with == "no-buffer-reuse":
        yield _fails(case, run, tuple(present.name for _, present in same))
    elif same:
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
            advice=case.re_export("or rename the axis of the present"),
        )


def _fails(case: Case, run: Run, presents: tuple[str, ...]) -> Fault:
    place = f'{run.node.op} "{run.node.name}"' if run.node else f"file {case.decode_file}"
    return Fault(
        severity="error",
        file=case.decode_file,
        subject=(run.node.name,) if run.node else presents or (case.decode_file,),
        where=place,
        promised="values of equal declared shapes that can share a buffer",
        observed=f"{run.experiment}, step {run.failed_step}: {run.error}; {run.reason}",
        cause="the declared shapes give one name to lengths that differ, and the runtime plans its memory by them",
        advice=case.re_export("or delete the value_info of the graph and rename the axes of the presents"),
        follows=(f"step {run.failed_step} fails",),
    )
