"""What is true of exports by Optimum after a common tool has rewritten them.

A rewritten export keeps the stacks, the cache and the faults of the export that it was made of, unless the tool breaks
it.
"""

from dataclasses import replace

from evidence.zoo import optimum_table
from evidence.zoo.row import HALF, Fault, Row, Variant

KINDS: tuple[Variant, ...] = ("int8", "fp16", "onnxslim", "ort-basic", "ort-all")

SOURCES = (
    *("marian", "t5", "bart", "whisper", "trocr", "vit-gpt2"),
    *("gpt2", "llama", "bloom", "falcon", "gpt_bigcode", "deepseek_v3"),
)
"""One or two of each layout and of each way to attend."""

BRANCHES_CONFUSED = Fault(
    "session-refused",
    "merged",
    "onnxslim 0.1.98 takes values of one name in the two branches for one value; no level of the runtime runs it",
)
NODE_BEFORE_ITS_INPUT = Fault(
    "invalid-graph",
    "merged",
    "onnxslim 0.1.98 confuses values of one name in the two branches, and leaves a node before what it reads",
)
BROKEN = {
    ("marian", "onnxslim"): BRANCHES_CONFUSED,
    ("t5", "onnxslim"): NODE_BEFORE_ITS_INPUT,
    ("bart", "onnxslim"): BRANCHES_CONFUSED,
}


def in_noise(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """What int8 leaves to be seen of faults: of several tokens on a cache perhaps no more than that they are off."""
    why = "several tokens on a cache differ, and noise hides which see too much"
    unmasked = [fault for fault in faults if fault.check == "mask-not-offset"]
    return (*faults, *(replace(fault, check="chunk-differs", why=why) for fault in unmasked))


def rewritten(source: Row, kind: Variant) -> Row:
    """The row of a rewritten export."""
    broken = BROKEN.get((source.architecture, kind))
    faults = in_noise(source.faults) if kind == "int8" else source.faults
    return replace(
        source,
        variant=kind,
        faults=(*faults, broken) if broken else faults,
        noisy=kind == "int8",
        largest=HALF if kind == "fp16" else source.largest,
    )


ROWS = tuple(rewritten(row, kind) for row in optimum_table.ROWS if row.architecture in SOURCES for kind in KINDS)
