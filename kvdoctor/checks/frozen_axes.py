"""An axis that must vary is declared as a number.

What it means: the past length of a cache that must grow (KV110), the batch (KV111) or the number of new tokens (KV112)
is a fixed number in the declared inputs. With a frozen past length no second step can be fed; the other two allow one
size only.

Reproduce: feed any other size; the runtime answers `Got invalid dimensions for input`.

Repair: `kvdoctor re-export` frees the axis where the graph tells which of its numbers stand for that length. Where
values were computed for it (rows of a table of positions, distances between tokens), they are lost to other lengths:
export again with dynamic axes, and with sample inputs whose sizes differ and are 2 or more, since exporters fix the
sizes 0 and 1.
"""

from collections.abc import Callable, Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import Axis, Port, describe
from kvdoctor.findings import Advice, Fault, Severity, check

EXPORT_AGAIN = "export again with dynamic axes; sample sizes of 2 or more, all different"
TWO_TOKENS = "export again with dynamic axes, and with sample inputs of 2 decoder tokens or more: 1 becomes a constant"
WHERE_TOLD = "where the graph tells what it would have to compute; else"


@check("KV110", "past-axis-frozen", "contract")
def past_axis_frozen(case: Case) -> Iterator[Fault]:
    """Slots that must grow and whose past length is a number."""
    contract = case.contract
    frozen = [slot for slot in (contract.growing if contract else ()) if slot.size("past") is not None]
    if frozen:
        slot = frozen[0]
        yield Fault(
            severity="error",
            file=case.decode_file,
            subject=tuple(slot.past for slot in frozen),
            where=f"input {first_and_count(tuple(slot.past for slot in frozen))}",
            promised="a past length that grows with each step",
            observed=describe(slot.dtype, slot.shape),
            cause=f"the past length is fixed at {slot.size('past')}",
            advice=case.re_export(f"{WHERE_TOLD} {TWO_TOKENS if slot.size('past') == 1 else EXPORT_AGAIN}"),
            follows=(_shown(case) or "a step with any other past length is refused by the runtime",),
        )


def _shown(case: Case) -> str | None:
    """The step of the run that met the frozen length."""
    run = case.run("frozen-past")
    if run is None or run.outcome != "failed" or not run.steps:
        return None
    step = run.steps[-1]
    return f"step {step.step}, fed a past of length {step.past_length}, fails: {run.error}"


@check("KV111", "batch-axis-frozen", "contract")
def batch_axis_frozen(case: Case) -> Iterator[Fault]:
    """Token ids or slots whose batch is a number: meant so where nothing grows, in graphs of fixed size."""
    severity: Severity = "note" if _is_fixed(case) else "warning"
    yield from _frozen_inputs(case, "batch", lambda _file, _size: severity, "any number of sequences at once")


@check("KV112", "sequence-axis-frozen", "contract")
def sequence_axis_frozen(case: Case) -> Iterator[Fault]:
    """Token ids whose number of new tokens is a number.

    Meant so in a decode graph beside its own prefill graph, and in graphs of fixed size.
    """
    paired = bool(case.contract and case.contract.first_step == "no-past-graph") and not _is_buffered(case)

    def severity(file: str, size: int) -> Severity:
        # The first step of an encoder-decoder may be its one start token.
        meant = file == case.decode_file or size == 1 if paired else _is_fixed(case)
        return "note" if meant else "warning"

    yield from _frozen_inputs(case, "new", severity, "any number of new tokens")


def _is_fixed(case: Case) -> bool:
    """Whether all slots are buffers or states of a fixed size, as in graphs for NPUs and in recurrent decoders."""
    if case.stack is not None and case.stack.operator is not None:
        return True  # the operator that holds this graph feeds one token at a time
    return bool(case.contract and case.contract.slots and not case.contract.growing)


def _is_buffered(case: Case) -> bool:
    """Whether some slots are buffers of a fixed size, as in graphs for NPUs."""
    return bool(case.contract and case.contract.capacity is not None) and _is_fixed(case)


def _frozen_inputs(case: Case, axis: Axis, severity: Callable[[str, int], Severity], promised: str) -> Iterator[Fault]:
    """One fault for each graph of the loop whose inputs have a number there; `severity` by its file and that number."""
    if case.contract is None:
        return
    for name in dict.fromkeys(phase.graph for name, phase in case.contract.phases.items() if name != "encode"):
        graph = case.contract.graphs[name]
        sizes = {port: _number(port, axis) for port in graph.inputs if port.role in ("token_ids", "past")}
        frozen = {port: size for port, size in sizes.items() if size is not None}
        for port, size in list(frozen.items())[:1]:
            names = tuple(port.name for port in frozen)
            grave = severity(graph.file, size)
            yield Fault(
                severity=grave,
                file=graph.file,
                subject=names,
                where=f"input {first_and_count(names)}",
                promised=promised,
                observed=describe(port.dtype, port.shape),
                cause=f"the axis {axis!r} is fixed at {size}",
                advice=_advice(case, grave),
                use="batch" if axis == "batch" else "chunked-prefill",
            )


def _advice(case: Case, severity: Severity) -> Advice:
    """What is meant so is left as it is by a repair."""
    if severity == "note":
        return Advice("re-export", EXPORT_AGAIN)
    return case.re_export(f"{WHERE_TOLD} {EXPORT_AGAIN}")


def _number(port: Port, axis: Axis) -> int | None:
    if port.shape is None or axis not in port.axes or len(port.shape) != len(port.axes):
        return None
    size = port.shape[port.axes.index(axis)]
    return size if isinstance(size, int) else None
