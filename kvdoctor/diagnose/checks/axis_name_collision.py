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

from kvdoctor.analysis.stale_shapes import StaleShape, compare_declared, find_stale_shapes
from kvdoctor.contract import describe
from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.checks._faults import list_nodes
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Fault, check


@check("KV113", "axis-name-collision", "contract")
def axis_name_collision(context: ContractContext) -> Iterator[Fault]:
    """Growing slots whose present has the axis name of its past."""
    same = []
    for slot, past, present in context.declared_pairs():
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
    run = context.checked_loop
    if run is not None and run.passes_with == "no-buffer-reuse":
        yield _fails(context, run, tuple(present.name for _, present in same))
        return
    yield from _report_stale(context)
    if same:
        past, present = same[0]
        names = tuple(present.name for _, present in same)
        yield Fault(
            severity="note",
            subject=names,
            declared=f"past {describe(past.dtype, past.shape)}",
            observed=f"present {describe(present.dtype, present.shape)}",
            cause="the present is longer than the past, but both lengths have the same axis name",
            repair=context.advise_graph_repair("or rename the axis of the present"),
        )


def _report_stale(context: ContractContext) -> Iterator[Fault]:
    """Values that are declared with the name of an input's axis, and have another length."""
    stale = find_stale_shapes(context.stack.main, context.contract) or tuple(_returned_otherwise(context))
    if stale:
        first = stale[0]
        axes = " and ".join(f"{first.declared[at]!r}" for at in first.axes)
        yield Fault(
            severity="note",
            subject=tuple(one.name for one in stale),
            where=f"declared shape of {first.name}" + (f" and {len(stale) - 1} more" if len(stale) > 1 else ""),
            declared=f"{first.name} {describe(first.dtype, first.declared)}",
            observed=f"{describe(first.dtype, first.found)} in a call whose inputs give {axes} another length",
            cause=f"{first.name} is declared in a shape that is not computed: its axis {axes} has not that length",
            repair=context.advise_graph_repair("or declare what is returned, and delete stale value_info"),
            apart=("stale",),
        )


def _returned_otherwise(context: ContractContext) -> Iterator[StaleShape]:
    """The outputs that a run returned in another shape than declared, and with right logits."""
    view, passed = context.decode_view, [run for run in context.runs if run.shows == "passed"]
    for step in (step for run in passed for step in run.steps if step.phase == "decode"):
        fed, got = ({name: tensor.shape for name, tensor in side.items()} for side in (step.fed, step.returned))
        found = tuple(compare_declared(view, context.contract, fed, got)) if view is not None else ()
        if found:
            yield from found
            return


def _fails(context: ContractContext, run: Run, presents: tuple[str, ...]) -> Fault:
    place = run.node.shown if run.node else f"file {context.decode_file}"
    return Fault(
        severity="error",
        subject=(run.node.name,) if run.node else presents or (context.decode_file,),
        where=place,
        run=run,
        error=run.error,
        declared="tensors with equal declared shapes, which can share a buffer",
        observed=f"{run.experiment}, step {run.failed_step}: {run.error}; {run.reason}",
        cause="two different lengths have the same axis name, and the runtime plans its memory by axis names",
        repair=context.advise_graph_repair(
            "or delete value_info from the graph and rename the axes of the present outputs"
        ),
        effects=(f"step {run.failed_step} fails",),
        nodes=list_nodes(run),
    )
