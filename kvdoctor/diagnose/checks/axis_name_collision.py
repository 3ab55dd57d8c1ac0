"""One symbolic axis name stands for two different lengths.

What it means: the past and the present of a growing slot have the same axis name, although the present is longer by the
new tokens; or shapes declared inside the graph do. Runtimes plan memory by these names, and loops that allocate buffers
by name allocate them too small. It is a note if the runs pass, and an error if a step fails, and passes once the
runtime does not reuse buffers.

Reproduce: `kvdoctor inspect MODEL` shows both declarations; open a session with `enable_mem_reuse = False`.

Repair: rename the axis of the present, for instance to `past_sequence_length + sequence_length`; delete the shapes that
are declared inside the graph (`value_info`), which no runtime needs.

Source: onnxruntime issue 21213.
"""

from collections.abc import Iterator

from kvdoctor.contract import describe
from kvdoctor.diagnose.checks._faults import list_nodes
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Fault, check


@check("KV113", "axis-name-collision", "contract")
def axis_name_collision(context: ContractContext) -> Iterator[Fault]:
    """Growing slots whose present has the axis name of its past."""
    same = []
    for slot, past, present in context.declared_pairs():
        if slot.growth != "grow" or "past" not in slot.axes or not past.shape or not present.shape:
            continue
        axis, alike = slot.axes.index("past"), len(past.shape) == len(present.shape)
        if alike and isinstance(past.shape[axis], str) and past.shape[axis] == present.shape[axis]:
            same.append((past, present))
    names, run = tuple(present.name for _, present in same), context.checked_loop
    if run is not None and run.passes_with == "no-buffer-reuse":
        cause = "two different lengths have the same axis name, and the runtime plans its memory by axis names"
        repair = "or delete value_info from the graph and rename the axes of the present outputs"
        subject = (run.node.name,) if run.node else names or (context.decode_file,)
        fault = Fault("error", subject, cause, context.advise_graph_repair(repair)).compare(
            "tensors with equal declared shapes, which can share a buffer",
            f"{run.experiment}, step {run.failed_step}: {run.error}; {run.reason}",
        )
        place, effects = run.node.shown if run.node else f"file {context.decode_file}", f"step {run.failed_step} fails"
        yield fault.also(where=place, run=run, error=run.error, effects=(effects,), nodes=list_nodes(run))
    elif same:
        cause = "the present is longer than the past, but both lengths have the same axis name"
        fault = Fault("note", names, cause, context.advise_graph_repair("or rename the axis of the present"))
        declared, observed = (describe(port.dtype, port.shape) for port in same[0])
        yield fault.compare(f"past {declared}", f"present {observed}")
