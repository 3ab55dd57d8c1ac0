"""Python: nothing is built, and what the program needs is installed where kvdoctor is."""

import sys

from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import LoopPlan


def refuses(plan: LoopPlan) -> str | None:
    """Logits that numpy cannot hold."""
    if "bfloat16" in (plan.prefill.logits_type, plan.decode.logits_type):
        return "the logits have element type bfloat16, which onnxruntime for Python cannot read"
    return None


LANGUAGE = Language(name="python", title="Python", build=(), run=(sys.executable, "main.py"), tools=(), refuses=refuses)
