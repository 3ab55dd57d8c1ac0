"""One symbolic axis name stands for two different lengths.

What it means: the past and the present of a growing slot have the same axis name, although the present is longer by the
new tokens; or shapes declared inside the graph do. Or an output, or a shape that is declared inside the graph, has the
name of the new tokens and another length: a tool cut to the last token and left the names. Runtimes plan memory by
these names, compilers take shapes from them, and loops that allocate buffers by name allocate them in a wrong size. It
is a note if the runs pass. It is an error if a step fails, and passes once the runtime does not reuse buffers.

How it is decided: by the declarations; shapes are compared with those of one step that is computed from the shapes of
its inputs alone, and with what runs returned.

Reproduce: `kvdoctor inspect MODEL` shows both declarations; open a session with `enable_mem_reuse = False`.

Repair: rename the axis of the present, for instance to `past_sequence_length + sequence_length`; delete the shapes that
are declared inside the graph (`value_info`), which no runtime needs.

Source: onnxruntime issue 21213.
"""

from collections.abc import Iterator

from kvdoctor.analysis.proof.prove import StaleShape, compare_declared, find_stale_shapes
from kvdoctor.contract import describe
from kvdoctor.diagnose.checks._faults import list_nodes
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Fault, Faults, check


@check("KV113", "axis-name-collision", "contract")
def axis_name_collision(context: ContractContext) -> Faults:
    """Growing slots whose present has the axis name of its past."""
    same = []
    for slot, past, present in context.declared_pairs():
        if slot.growth != "grow" or "past" not in slot.axes or not past.shape or not present.shape:
            continue
        axis, same_rank = slot.axes.index("past"), len(past.shape) == len(present.shape)
        if same_rank and isinstance(past.shape[axis], str) and past.shape[axis] == present.shape[axis]:
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
        return
    yield from _report_stale(context)
    if same:
        cause = "the present is longer than the past, but both lengths have the same axis name"
        fault = Fault("note", names, cause, context.advise_graph_repair("or rename the axis of the present"))
        declared, observed = (describe(port.dtype, port.shape) for port in same[0])
        yield fault.compare(f"past {declared}", f"present {observed}")


def _report_stale(context: ContractContext) -> Iterator[Fault]:
    """Values that are declared with the name of an input's axis, and have another length."""
    stale = find_stale_shapes(context.stack, context.contract) or tuple(_returned_otherwise(context))
    if stale:
        first = stale[0]
        axes = " and ".join(f"{first.declared[at]!r}" for at in first.axes)
        found = describe(first.dtype, first.found)
        cause = f"{first.name} is {found}, where its declared axis {axes} stands for another length"
        repair = context.advise_graph_repair("or declare what is returned, and delete stale value_info")
        fault = Fault("note", tuple(one.name for one in stale), cause, repair).compare(
            f"{first.name} {describe(first.dtype, first.declared)}",
            f"{found} in a call whose inputs give {axes} another length",
        )
        where = f"declared shape of {first.name}" + (f" and {len(stale) - 1} more" if len(stale) > 1 else "")
        yield fault.also(where=where, apart=("stale",))


def _returned_otherwise(context: ContractContext) -> Iterator[StaleShape]:
    """The outputs that a run returned in another shape than declared, and with right logits."""
    view, passed = context.decode_view, [run for run in context.runs if run.shows == "passed"]
    for step in (step for run in passed for step in run.steps if step.phase == "decode"):
        fed, got = ({name: tensor.shape for name, tensor in side.items()} for side in (step.fed, step.returned))
        found = tuple(compare_declared(view, context.contract, fed, got)) if view is not None else ()
        if found:
            yield from found
            return
