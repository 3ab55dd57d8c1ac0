"""The model decodes slower, or takes more memory, than in an earlier report.

What it means: with the same settings on the same kind of machine, the time to the first token, the time of a step, the
peak of the memory or the bytes of cache that a step writes are larger than they were: another export, another release
of the runtime, or another execution provider.

How it is decided: `kvdoctor speed` measures five rounds at each length of the past. A time is worse if its median is
larger by more than a tenth and by more than the ranges of the rounds in both reports, added. Where these add up to more
than half of the time, the machine was busy and the figure is not compared (not checked). Memory may be larger by a
tenth and 16 MiB, the written bytes not at all.

Reproduce: `kvdoctor speed MODEL --against speed.json`.

Repair: compare the models (`kvdoctor diff OLD NEW`) and the releases of the runtime; if the change is meant, write a
new report (`kvdoctor speed MODEL --output speed.json`).
"""

from collections.abc import Iterator

from kvdoctor.decode.speed import SpeedDifference
from kvdoctor.diagnose.context import SpeedContext
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.report.wording import format_bytes, format_milliseconds

FIND_CHANGE = Advice(
    "re-export",
    "compare the models (`kvdoctor diff OLD NEW`) and the releases of the runtime; if the change is meant, write a new "
    "report",
)


@check("KV503", "slower", "speed")
def slower(context: SpeedContext) -> Iterator[Fault]:
    """Figures that are worse than in the earlier report, one for each length of the past."""
    for found in context.differences:
        if found.noisy:
            continue
        at = f"a past of {found.past}"
        cause = f"{found.what} is larger than in the earlier report"
        yield Fault("error", (f"{found.what}, {at}",), cause, FIND_CHANGE, where=at).compare(
            f"{_format(found, found.before)}, and at most {found.tolerance:.0%} more",
            f"{_format(found, found.now)}, {found.now / max(found.before, 1e-12):.2g} times as much",
        )


def _format(found: SpeedDifference, figure: float) -> str:
    if found.what in ("peak memory", "cache written per step"):
        return format_bytes(int(figure))
    return format_milliseconds(figure)
