"""An axis that must be dynamic is declared with a fixed size.

Reproduce: feed any other size; the runtime answers `Got invalid dimensions for input`.

Repair: `kvdoctor re-export` makes the axis dynamic where the graph shows which of its numbers stand for that length.
Where values were computed for one length (rows of a position table, distances between tokens), other lengths cannot be
recovered: export again with dynamic axes, and with sample inputs whose sizes differ and are 2 or more, since exporters
fix the sizes 0 and 1.
"""

import json
import re
from collections.abc import Callable

from kvdoctor.contract import DECODING, Axis, Graph, Slot, describe
from kvdoctor.diagnose.checks.cache_mismatch import require_equal_ranks
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, Severity, check

EXPORT_AGAIN = "export again with dynamic axes and sample inputs of different sizes, all 2 or more"
OPEN_AXES: tuple[Axis, ...] = ("past", "batch", "new", "total", "encoder", "encoder_input", "batch_heads", "batch_new")
"""The axes that change from call to call; of the first three, the findings on the later ones refer to the earlier."""


def write_dynamic_axes(graph: Graph, slots: tuple[Slot, ...]) -> str:
    """The argument of `torch.onnx.export` that makes the axes of a graph dynamic, equal layers as one entry."""
    ports = {port.name: _write_axes(port.axes) for port in (*graph.inputs, *graph.outputs)}
    presents = {slot.present: _write_axes(slot.axes).replace('"past"', '"total"') for slot in slots if slot.present}
    ports |= {name: axes for name, axes in presents.items() if name in ports}
    entries, layers = [], dict[tuple[str, str, str], list[int]]()
    for name, axes in ports.items():
        parts = re.fullmatch(r"([^\d{}]*)(0|[1-9]\d*)([^{}]*)", name)
        if parts is not None and axes:
            layers.setdefault((parts[1], parts[3], axes), []).append(int(parts[2]))
        elif axes:
            entries.append(f"{json.dumps(name)}: {{{axes}}}")
    equal = dict[tuple[str, str, tuple[int, ...]], list[str]]()
    for (start, end, axes), found in layers.items():
        equal.setdefault((start, axes, tuple(found)), []).append(end)
    for (start, axes, counted), ends in equal.items():
        numbers = f"range({len(counted)})" if counted == tuple(range(len(counted))) else str(counted)
        pattern = json.dumps(f"{start}{{i}}{ends[0] if len(ends) == 1 else '{end}'}")
        more = f" for end in {json.dumps(ends)}" if len(ends) > 1 else ""
        entries.append(f"**{{f{pattern}: {{{axes}}} for i in {numbers}{more}}}")
    return f"dynamic_axes={{{', '.join(entries)}}}"


def _write_axes(axes: tuple[Axis, ...]) -> str:
    return ", ".join(f'{place}: "{axis}"' for place, axis in enumerate(axes) if axis in OPEN_AXES)


def _advise_export(context: ContractContext, graph: Graph, axis: Axis) -> str:
    """What to export with: the argument itself at the first kind of axis that is frozen, at the others a short text."""
    kinds = OPEN_AXES[: OPEN_AXES.index(axis)]
    if any(port.size(kind) is not None for port in graph.inputs for kind in kinds):
        return EXPORT_AGAIN
    argument = write_dynamic_axes(graph, context.contract.slots)
    return f"{EXPORT_AGAIN}; {argument}"


@check("KV110", "past-axis-frozen", "contract")
def past_axis_frozen(context: ContractContext) -> Faults:
    """Slots that must grow, with a fixed past length.

    What it means: the past length of a growing cache is a fixed number in the declared inputs. A second step, which has
    a longer past, cannot be fed.
    """
    contract = context.contract
    frozen = [slot for slot in contract.growing if slot.size("past") is not None]
    if frozen:
        require_equal_ranks(context)
        slot, graph, run = frozen[0], contract.graph("decode"), context.find_run("frozen-past")
        effect = "the runtime refuses a step with any other past length"
        if run is not None and run.outcome == "failed" and run.steps:
            step = run.steps[-1]
            effect = f"step {step.step}, fed a past of length {step.past_length}, fails: {run.error}"
        advice = context.advise_graph_repair(_advise_export(context, graph, "past"))
        subject, cause = tuple(slot.past for slot in frozen), f"the past length is fixed at {slot.size('past')}"
        fault = Fault("error", subject, cause, advice, effects=(effect,))
        yield fault.compare("a past length that grows with each step", describe(slot.dtype, slot.shape))


@check("KV111", "batch-axis-frozen", "contract")
def batch_axis_frozen(context: ContractContext) -> Faults:
    """Token ids or slots with a fixed batch: only a note in a graph of fixed sizes throughout.

    What it means: the batch is a fixed number in the declared inputs. The graph takes that many sequences at once, and
    no other number. In a graph in which all sizes are fixed it is a note.
    """
    severity: Severity = "note" if _is_fixed(context) else "warning"
    yield from _find_fixed_inputs(context, "batch", lambda _file, _size: severity, "any number of sequences at once")


@check("KV112", "sequence-axis-frozen", "contract")
def sequence_axis_frozen(context: ContractContext) -> Faults:
    """Token ids with a fixed number of new tokens.

    What it means: the number of new tokens is a fixed number in the declared inputs. A prompt of another length, or
    several tokens on top of a cache, cannot be fed in one call. It is a note in a decode graph with its own prefill
    graph, and in a graph in which all sizes are fixed.
    """
    buffered = context.contract.capacity is not None and _is_fixed(context)
    paired = context.contract.first_step == "no-past-graph" and not buffered

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


def _find_fixed_inputs(
    context: ContractContext, axis: Axis, severity: Callable[[str, int], Severity], declared: str
) -> Faults:
    """One fault for each graph of the loop with a fixed axis; `severity` by its file and the size."""
    for name in dict.fromkeys(context.contract.phases[phase].graph for phase in DECODING):
        graph = context.contract.graphs[name]
        sizes = {port: port.size(axis) for port in graph.inputs if port.role in ("token_ids", "past")}
        frozen = {port: size for port, size in sizes.items() if size is not None}
        for port, size in list(frozen.items())[:1]:
            level = severity(graph.file, size)
            # A repair does not change an axis that is fixed on purpose.
            text = _advise_export(context, graph, axis)
            again = Advice("re-export", text) if level == "note" else context.advise_graph_repair(text)
            what = "the batch size" if axis == "batch" else "the number of new tokens per call"
            subject, cause = tuple(port.name for port in frozen), f"{what} is fixed at {size}"
            fault = Fault(level, subject, cause, again, file=graph.file)
            fault = fault.compare(declared, describe(port.dtype, port.shape))
            yield fault.also(use="batch" if axis == "batch" else "chunked-prefill")
