"""Equal decode steps take more and more memory.

What it means: a step that is fed the same past again and again needs the same memory each time. Here the resident
memory of the process grows with the number of steps, so a long conversation or a server runs out of it.

How it is decided: `kvdoctor speed` repeats one step on a past of 16 tokens: 200 times (or for 10 seconds), and then
2,000 times more (or until 20 seconds have passed in all). The resident memory after the first steps is compared with
that after the last; more than 8 MiB is a leak. Where fewer than 100 steps follow the first ones, it is not checked.

Reproduce: `kvdoctor speed MODEL`.

Repair: try another release of the runtime, or without its memory arena (`SessionOptions.enable_cpu_mem_arena`).
"""

from collections.abc import Iterator

from kvdoctor.decode.speed import LEAK_BYTES, LEAST_STEPS
from kvdoctor.diagnose.context import SpeedContext
from kvdoctor.errors import CannotCheck
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.report.wording import format_bytes


@check("KV504", "memory-grows", "speed")
def memory_grows(context: SpeedContext) -> Iterator[Fault]:
    """Memory that equal steps never give back."""
    speed = context.speed
    if speed.grown_bytes <= LEAK_BYTES:
        if speed.steps < LEAST_STEPS:
            text = f"{speed.steps} equal steps were run in the time, and {LEAST_STEPS} tell whether they leak"
            raise CannotCheck(text)
        return
    advice = Advice("caller", "try another release of the runtime, or without its memory arena")
    fault = Fault("error", (context.decode_file,), "equal steps take more and more memory", advice)
    declared = f"at most {format_bytes(LEAK_BYTES)} more after the last step than after the first ones"
    fault = fault.compare(declared, f"{format_bytes(speed.grown_bytes)} more")
    yield fault.also(where=f"{speed.steps} equal steps on a past of {speed.points[0].past}")
