"""Java 17, with the binding of Microsoft (`com.microsoft.onnxruntime`); its jar holds the runtime."""

from itertools import chain

from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import LoopPlan, refuses_in_c


def refuses(plan: LoopPlan) -> str | None:
    """Why the binding cannot run a plan, or None."""
    for call in plan.calls:
        fed = {one.name for one in call.inputs} | set(call.pasts)
        for name in sorted(chain(fed, call.outputs, [call.file])):
            if any(ord(char) > 0xFFFF for char in name):
                return (
                    "onnxruntime 1.29.0 for Java gives names to the runtime as modified UTF-8, in which characters "
                    f"beyond U+FFFF differ from UTF-8: it does not find {name!r}; rename it"
                )
        if shared := fed & set(call.outputs):
            return (
                f"{min(shared)!r} is an input and an output: the runtime returns the very memory that was fed, "
                "which onnxruntime 1.29.0 for Java frees when the input is collected; rename the output"
            )
    return refuses_in_c(plan)


LANGUAGE = Language(
    name="java",
    title="Java",
    build=(("mvn", "-q", "package"),),
    run=("java", "-jar", "target/decode-loop.jar"),
    tools=("java", "mvn"),
    refuses=refuses,
)
