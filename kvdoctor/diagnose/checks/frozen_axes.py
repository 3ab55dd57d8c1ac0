"""An axis that must be dynamic is declared with a fixed size.

What it means: an axis that changes from call to call is a fixed number in the declared inputs.

Reproduce: feed any other size; the runtime answers `Got invalid dimensions for input`.

Repair: `kvdoctor re-export` makes the axis dynamic where the graph shows which of its numbers stand for that length.
Where values were computed for one length (rows of a position table, distances between tokens), other lengths cannot be
recovered: export again with dynamic axes, and with sample inputs whose sizes differ and are 2 or more, since exporters
fix the sizes 0 and 1.
"""

from collections.abc import Callable, Iterator

from kvdoctor.contract import DECODING, Axis, describe
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Severity, check
from kvdoctor.report.wording.units import shorten_names

EXPORT_AGAIN = "export again with dynamic axes; sample sizes of 2 or more, all different"
TWO_TOKENS = "export again with dynamic axes, and with sample inputs of 2 decoder tokens or more: 1 becomes a constant"


@check("KV110", "past-axis-frozen", "contract")
def past_axis_frozen(context: ContractContext) -> Iterator[Fault]:
    """Slots that must grow, with a fixed past length.

    What it means: the past length of a growing cache is a fixed number in the declared inputs. A second step, which has
    a longer past, cannot be fed.
    """
    contract = context.contract
    frozen = [slot for slot in contract.growing if slot.size("past") is not None]
    if frozen:
        slot = frozen[0]
        yield Fault(
            severity="error",
            file=context.decode_file,
            subject=tuple(slot.past for slot in frozen),
            where=f"input {shorten_names(tuple(slot.past for slot in frozen))}",
            declared="a past length that grows with each step",
            observed=describe(slot.dtype, slot.shape),
            cause=f"the past length is fixed at {slot.size('past')}",
            repair=context.advise_graph_repair(TWO_TOKENS if slot.size("past") == 1 else EXPORT_AGAIN),
            effects=(_describe_failed_step(context) or "the runtime refuses a step with any other past length",),
        )


def _describe_failed_step(context: ContractContext) -> str | None:
    """The step of the run that failed at the fixed length."""
    run = context.find_run("frozen-past")
    if run is None or run.outcome != "failed" or not run.steps:
        return None
    step = run.steps[-1]
    return f"step {step.step}, fed a past of length {step.past_length}, fails: {run.error}"


@check("KV111", "batch-axis-frozen", "contract")
def batch_axis_frozen(context: ContractContext) -> Iterator[Fault]:
    """Token ids or slots with a fixed batch: only a note in a graph of fixed sizes throughout.

    What it means: the batch is a fixed number in the declared inputs. The graph takes that many sequences at once, and
    no other number. In a graph in which all sizes are fixed it is a note.
    """
    severity: Severity = "note" if _is_fixed(context) else "warning"
    yield from _find_fixed_inputs(context, "batch", lambda _file, _size: severity, "any number of sequences at once")


@check("KV112", "sequence-axis-frozen", "contract")
def sequence_axis_frozen(context: ContractContext) -> Iterator[Fault]:
    """Token ids with a fixed number of new tokens.

    What it means: the number of new tokens is a fixed number in the declared inputs. A prompt of another length, or
    several tokens on top of a cache, cannot be fed in one call. It is a note in a decode graph beside its own prefill
    graph, and in a graph in which all sizes are fixed.
    """
    paired = context.contract.first_step == "no-past-graph" and not _is_buffered(context)

    def severity(file: str, size: int) -> Severity:
        # The first step of an encoder-decoder may be its one start token.
        meant = file == context.decode_file or size == 1 if paired else _is_fixed(context)
        return "note" if meant else "warning"

    yield from _find_fixed_inputs(context, "new", severity, "any number of new tokens")


def _is_fixed(context: ContractContext) -> bool:
    """Whether all slots are buffers or states of a fixed size, as in graphs for NPUs and in recurrent decoders."""
    if context.stack.operator is not None:
        return True  # the operator that holds this graph feeds one token at a time
    contract = context.contract
    windows = (slot for slot in contract.slots if slot.trimmed and "past" in slot.axes)
    free = any(slot.size("past") is None for slot in windows)
    return bool(contract.slots and not contract.growing) and not free


def _is_buffered(context: ContractContext) -> bool:
    """Whether some slots are buffers of a fixed size, as in graphs for NPUs."""
    return context.contract.capacity is not None and _is_fixed(context)


def _find_fixed_inputs(
    context: ContractContext, axis: Axis, severity: Callable[[str, int], Severity], declared: str
) -> Iterator[Fault]:
    """One fault for each graph of the loop with a fixed axis; `severity` by its file and the size."""
    for name in dict.fromkeys(context.contract.phases[phase].graph for phase in DECODING):
        graph = context.contract.graphs[name]
        sizes = {port: port.size(axis) for port in graph.inputs if port.role in ("token_ids", "past")}
        frozen = {port: size for port, size in sizes.items() if size is not None}
        for port, size in list(frozen.items())[:1]:
            names = tuple(port.name for port in frozen)
            level = severity(graph.file, size)
            yield Fault(
                severity=level,
                file=graph.file,
                subject=names,
                where=f"input {shorten_names(names)}",
                declared=declared,
                observed=describe(port.dtype, port.shape),
                cause=f"the axis {axis!r} is fixed at {size}",
                repair=_choose_advice(context, level),
                use="batch" if axis == "batch" else "chunked-prefill",
            )


def _choose_advice(context: ContractContext, severity: Severity) -> Advice:
    """A repair does not change an axis that is fixed on purpose."""
    if severity == "note":
        return Advice("re-export", EXPORT_AGAIN)
    return context.advise_graph_repair(EXPORT_AGAIN)
