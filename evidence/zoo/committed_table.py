"""What is true of the exports committed under fixtures/exports, all by Optimum, and of what onnxruntime makes of them.

They need neither the network nor another environment, so that a sample of them is part of every test run.
"""

from evidence.zoo.optimum_table import DECODER, EMPTIED, ENCODER_DECODER, UNMASKED
from evidence.zoo.row import Row, Variant
from evidence.zoo.variants_table import rewritten

KINDS: tuple[Variant, ...] = ("int8", "fp16", "ort-basic", "ort-all")
"""Those that onnxruntime brings along."""

EXPORTED = (
    # fails in a Reshape, the others in a MatMul
    Row("committed", "marian-4.46.3", ENCODER_DECODER, faults=(EMPTIED, *UNMASKED)),
    Row("committed", "marian-4.57.6", ENCODER_DECODER, faults=(EMPTIED,)),
    Row("committed", "t5", ENCODER_DECODER, faults=(EMPTIED,)),
    Row("committed", "whisper", ENCODER_DECODER, faults=(EMPTIED,)),
    Row("committed", "gpt2", DECODER),
    Row("committed", "llama-gqa", DECODER),
)

ROWS = (*EXPORTED, *(rewritten(row, kind) for row in EXPORTED for kind in KINDS))

SAMPLED = {
    ("gpt2", "fp16"),
    ("llama-gqa", "int8"),
    ("llama-gqa", "ort-basic"),
}
SAMPLE = tuple(row for row in ROWS if (row.architecture, row.variant) in SAMPLED)
"""What every test run sees, beside the exports themselves: each kind of rewriting once, but for the slow ones."""
