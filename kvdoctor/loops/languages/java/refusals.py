"""What the Java binding cannot do: the plans for which there is no loop in Java."""

from kvdoctor.loops.plan import CallPlan, LoopPlan

LOGITS = ("float", "float16", "bfloat16")
"""The element types that `OnnxTensor.getFloatBuffer` reads."""


def refuses(plan: LoopPlan) -> str | None:
    """Why the binding cannot run a plan, or None."""
    names = {name for call in plan.calls for name in (*_fed(call), *call.outputs, call.file)}
    for name in sorted(names):
        if any(ord(char) > 0xFFFF or char == "\0" for char in name):
            return (
                "onnxruntime 1.29.0 for Java gives names to the runtime as modified UTF-8, in which characters beyond "
                f"U+FFFF and NUL differ from UTF-8: it does not find {name!r}; rename it"
            )
    if shared := [name for call in plan.calls for name in call.outputs if name in _fed(call)]:
        return (
            f"{shared[0]!r} is an input and an output: the runtime returns the very memory that was fed, "
            "which onnxruntime 1.29.0 for Java frees when the input is collected; rename the output"
        )
    if other := next((one.logits_type for one in plan.calls if one.logits and one.logits_type not in LOGITS), None):
        return f"the logits are {other}, which OnnxTensor.getFloatBuffer of onnxruntime 1.29.0 does not read"
    return None


def _fed(call: CallPlan) -> set[str]:
    return {one.name for one in call.inputs} | set(call.pasts)
