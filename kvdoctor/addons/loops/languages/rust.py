"""Rust, with the crate `ort`: values go from step to step as the runtime made them."""

from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import LoopPlan, list_names, refuses_in_c

DYNAMIC = ("--release", "--quiet", "--no-default-features", "--features", "dynamic")
"""The runtime is a shared library that is there: nothing is downloaded but crates."""


def refuses(plan: LoopPlan) -> str | None:
    """Names that do not reach the runtime: ort passes them as C strings, and Rust's strings are UTF-8."""
    for name in list_names(plan):
        if any("\ud800" <= char <= "\udfff" for char in name):
            return f"the name {name!r} is not UTF-8, as Rust's strings are"
    return refuses_in_c(plan)


LANGUAGE = Language(
    name="rust",
    title="Rust",
    build=(("cargo", "build", *DYNAMIC),),
    run=("cargo", "run", *DYNAMIC, "--"),
    tools=("cargo",),
    environment={"ORT_DYLIB_PATH": "{onnxruntime}", "CARGO_TARGET_DIR": "target"},
    refuses=refuses,
)
