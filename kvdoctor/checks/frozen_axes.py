"""An axis that must vary is declared as a number.

What it means: the past length of a cache that must grow (KV110), the batch (KV111) or the number of new tokens (KV112)
is a fixed number in the declared inputs. With a frozen past length no second step can be fed; the other two allow one
size only.

Reproduce: feed any other size; the runtime answers `Got invalid dimensions for input`.

Repair: export again with dynamic axes, and with sample inputs whose sizes differ and are 2 or more: exporters fix the
sizes 0 and 1.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import Axis, Port, describe
from kvdoctor.findings import Advice, Fault, Severity, check

EXPORT_AGAIN = Advice("re-export", "export again with dynamic axes; sample sizes of 2 or more, all different")


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
            advice=EXPORT_AGAIN,
            follows=("a step with any other past length is refused by the runtime",),
        )


@check("KV111", "batch-axis-frozen", "contract")
def batch_axis_frozen(case: Case) -> Iterator[Fault]:
    """Token ids or slots whose batch is a number: meant so where nothing grows, in graphs of fixed size."""
    yield from _frozen_inputs(
        case, "batch", "note" if _is_fixed(case) else "warning", "any number of sequences at once"
    )


@check("KV112", "sequence-axis-frozen", "contract")
def sequence_axis_frozen(case: Case) -> Iterator[Fault]:
    """Token ids whose number of new tokens is a number.

    Meant so in a decode graph beside its own prefill graph, and in graphs of fixed size.
    """
    paired = bool(case.contract and case.contract.first_step == "no-past-graph") or _is_fixed(case)
    yield from _frozen_inputs(case, "new", "note" if paired else "warning", "any number of new tokens")


def _is_fixed(case: Case) -> bool:
    """Whether all slots are buffers or states of a fixed size, as in graphs for NPUs and in recurrent decoders."""
    if case.stack is not None and case.stack.operator is not None:
        return True  # the operator that holds this graph feeds one token at a time
    return bool(case.contract and case.contract.slots and not case.contract.growing)


def _frozen_inputs(case: Case, axis: Axis, severity: Severity, promised: str) -> Iterator[Fault]:
    if case.contract is None:
        return
    for graph in {phase.graph for name, phase in case.contract.phases.items() if name != "encode"}:
        ports = case.contract.graphs[graph].inputs
        frozen = [port for port in ports if port.role in ("token_ids", "past") and _number(port, axis) is not None]
        if frozen:
            port = frozen[0]
            names = tuple(port.name for port in frozen)
            yield Fault(
                severity=severity,
                file=case.contract.graphs[graph].file,
                subject=names,
                where=f"input {first_and_count(names)}",
                promised=promised,
                observed=describe(port.dtype, port.shape),
                cause=f"the axis {axis!r} is fixed at {_number(port, axis)}",
                advice=EXPORT_AGAIN,
            )


def _number(port: Port, axis: Axis) -> int | None:
    if port.shape is None or axis not in port.axes or len(port.shape) != len(port.axes):
        return None
    size = port.shape[port.axes.index(axis)]
    return size if isinstance(size, int) else None
