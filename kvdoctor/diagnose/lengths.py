"""Which lengths the experiments visited, and which thresholds of the graphs they did not."""

import sys
from collections.abc import Iterator, Sequence

from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.analysis.thresholds import Threshold, find_thresholds, writes_around
from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.decode.experiments.each_length import FAR_LENGTH
from kvdoctor.decode.runs import ONLY_THOROUGH, REFERENCE_CHANGES, Run
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import NotChecked

MOST_LISTED = 4


def list_thresholds(stack: StackFiles, contract: CacheContract) -> tuple[Threshold, ...]:
    """Return the length thresholds of the graphs that decode, one for each length."""
    found: dict[int, Threshold] = {}
    phases: tuple[PhaseName, ...] = ("decode", "prefill")
    for phase in phases:
        graph = contract.graph(phase)
        file = next((file for file in stack.files.values() if file.name == graph.file), None)
        if file is None or file.view is None:
            continue
        dataflow = file.dataflow if phase == "decode" else file.first_dataflow
        for threshold in find_thresholds(dataflow.flow, graph) if dataflow is not None else ():
            found.setdefault(threshold.length, threshold)
    return tuple(found[length] for length in sorted(found))


def find_ring(stack: StackFiles, contract: CacheContract) -> int | None:
    """The capacity of the buffers of a contract, where the graph that decodes writes them from their start again."""
    graph, size = contract.graph("decode"), contract.capacity
    file = next((file for file in stack.files.values() if file.name == graph.file), None)
    if size is None or size != contract.usable_length or file is None or file.dataflow is None:
        return None
    return size if writes_around(file.dataflow.flow, size) else None


def list_unvisited(context: ContractContext) -> Iterator[NotChecked]:
    """Yield one entry for what the walk over the lengths did not judge: all of it, or thresholds behind its end.

    None where the loop, or a length that was visited, already differs or fails.
    """
    run, loop = context.find_run("each-length"), context.checked_loop
    steps_agree = loop is not None and loop.shows == "passed"
    if steps_agree and run is not None and run.outcome == "skipped" and run.reason == REFERENCE_CHANGES:
        yield NotChecked(context.stack.name, "KV308", f"{run.reason}: lengths were not visited one by one")
    if run is None or run.shows != "passed":
        return
    walked, longest = _longest_past((run,)), _longest_past(context.runs)
    usable = min(context.contract.usable_length or sys.maxsize, _fed_at_most(context.contract))
    found = list_thresholds(context.stack, context.contract)
    left = [one for one in found if longest + 1 < one.length < usable]  # a table of n rows ends at a past of n - 1
    if not left:
        return
    listed = ", ".join(f"{one.length} ({one.node})" for one in left[:MOST_LISTED])
    more = f" and {len(left) - MOST_LISTED} more" if len(left) > MOST_LISTED else ""
    reason = f"every past up to {walked} tokens was run, and none beyond {longest}; thresholds of the graph beyond: "
    far = context.find_run("far-thresholds")
    tried = far is not None and (far.outcome != "skipped" or far.reason != ONLY_THOROUGH)
    longer = "" if tried else f"; --thorough visits those up to {FAR_LENGTH}"
    yield NotChecked(context.stack.name, "KV308", f"{reason}{listed}{more}{longer}")


def _fed_at_most(contract: CacheContract) -> int:
    """The smallest number that an input declares for the axis of all tokens, such as a mask of fixed size."""
    ports = (port for graph in contract.graphs.values() for port in graph.inputs if port.shape is not None)
    sizes = (size for port in ports for axis, size in zip(port.axes, port.shape or (), strict=True) if axis == "total")
    return min((size for size in sizes if isinstance(size, int)), default=sys.maxsize)


def _longest_past(runs: Sequence[Run]) -> int:
    """The longest past of a step whose logits were compared, in tokens; 0 where there is none."""
    steps = (step for run in runs for step in run.steps if step.phase == "decode" and step.difference is not None)
    return max((step.past_length for step in steps), default=0)
