"""The largest IR version and opset that a runtime opens, measured by opening models of one node.

For releases beyond the table of `targets/limits.json`, newer than this kvdoctor. The models are written
as protobuf by hand: the worker has no onnx. Fields by onnx.proto of ONNX.
"""

import onnxruntime as ort

from kvdoctor.decode.messages import LimitsMeasured
from kvdoctor.runtime.worker.sessions import session_options

LEAST_IR, LEAST_OPSET = 8, 13
"""What every release takes that kvdoctor runs under."""
MOST = 127
"""One byte of protobuf holds no more; no version is near it."""


def measure_limits() -> LimitsMeasured:
    """The largest IR version and the largest opset, each measured beside the smallest of the other.

    Neither where not even the oldest model opens: then the fault is not a version.
    """
    if not _opens(LEAST_IR, LEAST_OPSET):
        return LimitsMeasured()
    ir = next(n for n in range(LEAST_IR, MOST) if n + 1 == MOST or not _opens(n + 1, LEAST_OPSET))
    opset = next(n for n in range(LEAST_OPSET, MOST) if n + 1 == MOST or not _opens(LEAST_IR, n + 1))
    return LimitsMeasured(ir, opset)


def _opens(ir: int, opset: int) -> bool:
    try:
        ort.InferenceSession(_identity(ir, opset), session_options("off", 1), providers=["CPUExecutionProvider"])
    except Exception:  # the bindings raise many types, and all of them are a refusal
        return False
    return True


def _identity(ir: int, opset: int) -> bytes:
    """`y = Identity(x)` with x and y float[1]."""
    one = _part(2, _part(1, _number(1, 1)))
    kind = _part(2, _part(1, _number(1, 1) + one))
    node = _part(1, b"x") + _part(2, b"y") + _part(4, b"Identity")
    graph = _part(1, node) + _part(2, b"g") + _part(11, _part(1, b"x") + kind) + _part(12, _part(1, b"y") + kind)
    return _number(1, ir) + _part(7, graph) + _part(8, _number(2, opset))


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3, value])


def _part(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2, len(content)]) + content
