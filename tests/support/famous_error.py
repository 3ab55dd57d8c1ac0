"""Where the plain loop of each merged export fails, at step 2, by the runtime that is installed."""

from importlib.metadata import version

EMPTY_BATCH_FAILS = tuple(map(int, version("onnxruntime").split(".")[:2])) < (1, 32)
"""Since release 1.32 MatMul takes a batch of 0, and the emptied cache comes further."""


def nodes_that_fail(empty_batch_fails: bool) -> dict[str, tuple[str, str]]:
    """Operator and name of the node, by export."""
    projection = "/model/decoder/layers.0/encoder_attn/" + ("MatMul" if empty_batch_fails else "out_proj/MatMul")
    added = ("Add", "/decoder/block.1/layer.0/SelfAttention/Add")
    return {
        "marian-4.46.3": ("Reshape", "/model/decoder/layers.0/encoder_attn/Reshape_4"),
        "marian-4.57.6": ("MatMul", projection),
        "t5": ("MatMul", "/decoder/block.0/layer.1/EncDecAttention/MatMul") if empty_batch_fails else added,
        "whisper": ("MatMul", projection),
    }


FIRST_TO_FAIL = nodes_that_fail(EMPTY_BATCH_FAILS)
