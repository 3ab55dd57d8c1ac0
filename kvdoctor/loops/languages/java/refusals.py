"""What the Java binding cannot do: the plans for which there is no loop in Java."""

from kvdoctor.loops.plan import LoopPlan

LOGITS = ("float", "float16", "bfloat16")
"""The element types that `OnnxTensor.getFloatBuffer` reads."""


def refuses(plan: LoopPlan) -> str | None:
    """Why the binding cannot run a plan, or None."""
    fed = {one.name for one in plan.inputs} | {slot.past for slot in plan.slots}
    got = {name for call in plan.calls for name in call.outputs}
    for name in sorted(fed | got):
        if any(ord(char) > 0xFFFF or char == "\0" for char in name):
            return (
                f"onnxruntime 1.29.0 for Java passes names to the runtime as modified UTF-8, so that {name!r} "
                "is not found: its characters beyond U+FFFF are encoded otherwise; rename it"
            )
    if shared := sorted(fed & got):
        return (
            f"{shared[0]!r} is an input and an output: the runtime returns the very memory that was fed, "
            "which onnxruntime 1.29.0 for Java frees when the input is collected; rename the output"
        )
    if other := next((one.logits_type for one in plan.calls if one.logits and one.logits_type not in LOGITS), None):
        return f"the logits are {other}, which OnnxTensor.getFloatBuffer of onnxruntime 1.29.0 does not read"
    return None
