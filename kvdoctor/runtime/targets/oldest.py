"""The oldest release of onnxruntime that opens a graph, by the measured table (`limits.json`)."""

from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.runtime.targets.demands import Demands, read_demands
from kvdoctor.runtime.targets.limits import ReleaseLimits, describe_feature, limits_of, releases


@record
class OldestRelease:
    """`release` and every newer measured one open the graph; `because` is what the one before it lacks, if any."""

    release: str
    because: str = ""


def find_oldest(view: GraphView) -> OldestRelease | None:
    """The oldest release that opens a graph; None if not even the newest measured one does."""
    asked, found = read_demands(view), None
    for name in reversed(releases()):
        limits = limits_of(name)
        if limits is None:
            continue
        if lacks := _find_lack(asked, limits):
            return OldestRelease(found, lacks) if found is not None else None
        found = name
    return OldestRelease(found) if found is not None else None


def _find_lack(asked: Demands, limits: ReleaseLimits) -> str:
    """What a release lacks, in words; empty if nothing."""
    if asked.opset > limits.opset:
        return f"opset {asked.opset}"
    if asked.ir > limits.ir:
        return f"IR version {asked.ir}"
    return ", ".join(sorted(map(describe_feature, asked.lacking(limits)))[:1])
