"""JavaScript with onnxruntime-node; the same program runs with onnxruntime-web in a browser, and has types."""

from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import LoopPlan, nul_in

DTYPES = ("float", "double", "float16", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
"""The element types that onnxruntime-common has."""


def refuses(plan: LoopPlan) -> str | None:
    """Names and element types that do not get through the binding."""
    if (name := nul_in(plan)) is not None:
        return f"the name {name!r} has a NUL, which ends it in the C interface of onnxruntime; rename it"
    if any("__proto__" in call.outputs for call in plan.calls):  # no key of its own in a plain object
        return "an output is called '__proto__', which onnxruntime-common (up to 1.30.0) cannot return; rename it"
    if strange := sorted(plan.dtypes.difference(DTYPES)):
        return f"onnxruntime for JavaScript has no element type {strange[0]}"
    return None


LANGUAGE = Language(
    name="javascript",
    title="JavaScript",
    build=(("npm", "install", "--omit=dev", "--no-audit", "--no-fund", "--loglevel=error"),),
    run=("node", "src/main.js"),
    tools=("node", "npm"),
    refuses=refuses,
)
