"""The languages that loops are written in, an entry each: how the program of a language is built and run."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path

from kvdoctor.addons.loops.cpp_headers import find_headers
from kvdoctor.addons.loops.plan import LoopPlan, list_names, nul_in, refuses_in_c
from kvdoctor.records import record

CARGO = ("--release", "--quiet", "--no-default-features", "--features", "dynamic")
"""The runtime is a shared library that is there: nothing is downloaded but crates."""
NPM = ("npm", "install", "--no-audit", "--no-fund", "--loglevel=error")
JAVASCRIPT_DTYPES = {
    *("float", "double", "float16", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
"""The element types that onnxruntime-common has."""


def needs_nothing(_cache: Path) -> Mapping[str, str]:
    """A language whose tools fetch all that a project needs."""
    return {}


@record
class Language:
    """A language, whose program is a folder of `programs/`.

    Attributes:
        name: As `--language` has it.
        title: As people write it.
        build: Commands that build the project, run in its folder, in order.
        run: The command that runs the program, run in its folder; arguments follow.
        tools: Programs that must be installed.
        refuses: Says why there is no loop for a plan in this language, or None.
        environment: Variables for building and running; `{onnxruntime}` stands for the runtime's shared library,
            `{cache}` for a folder where builds may keep what later ones use.
        prepare: Fetches what the tools of the language do not, into that folder; returns further variables.
        program: The language whose program it has; None where it has one of its own.
    """

    name: str
    title: str
    build: tuple[tuple[str, ...], ...]
    run: tuple[str, ...]
    tools: tuple[str, ...]
    refuses: Callable[[LoopPlan], str | None]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], Mapping[str, str]] = needs_nothing
    program: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of its program."""
        return Path(__file__).parent / "programs" / (self.program or self.name)


def _refuses_in_java(plan: LoopPlan) -> str | None:
    for call in plan.calls:
        fed = {one.name for one in call.inputs} | set(call.pasts)
        for name in sorted((*fed, *call.outputs, call.file)):
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


def _refuses_in_javascript(plan: LoopPlan) -> str | None:
    if (name := nul_in(plan)) is not None:
        return f"the name {name!r} has a NUL, which ends it in the C interface of onnxruntime; rename it"
    if any("__proto__" in call.outputs for call in plan.calls):  # no key of its own in a plain object
        return "an output is called '__proto__', which onnxruntime-common (up to 1.30.0) cannot return; rename it"
    if strange := sorted(plan.dtypes - JAVASCRIPT_DTYPES):
        return f"onnxruntime for JavaScript has no element type {strange[0]}"
    return None


def _refuses_in_python(plan: LoopPlan) -> str | None:
    if "bfloat16" in (plan.prefill.logits_type, plan.decode.logits_type):
        return "the logits have element type bfloat16, which onnxruntime for Python cannot read"
    return None


def _refuses_in_rust(plan: LoopPlan) -> str | None:
    """Names that do not reach the runtime: ort passes them as C strings, and Rust's strings are UTF-8."""
    for name in list_names(plan):
        if any("\ud800" <= char <= "\udfff" for char in name):
            return f"the name {name!r} is not UTF-8, as Rust's strings are"
    return refuses_in_c(plan)


CPP = Language(
    name="cpp",
    title="C++",
    build=(("cmake", "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release"), ("cmake", "--build", "build")),
    run=("build/decode",),
    tools=("cmake", "c++"),
    refuses=refuses_in_c,
    environment={"ONNXRUNTIME_LIB": "{onnxruntime}"},
    prepare=find_headers,
)
"""With the runtime's own C++ interface; values are passed on by their handles."""

GO = Language(
    name="go",
    title="Go",
    build=(("go", "build", "-o", ".", "./cmd/decode"),),
    run=("./decode",),
    tools=("go", "gcc"),
    refuses=refuses_in_c,
    environment={"ONNXRUNTIME_LIB": "{onnxruntime}"},
)
"""With github.com/yalue/onnxruntime_go."""

JAVA = Language(
    name="java",
    title="Java",
    build=(("mvn", "-q", "package"),),
    run=("java", "-jar", "target/decode-loop.jar"),
    tools=("java", "mvn"),
    refuses=_refuses_in_java,
)
"""Java 17, with the binding of Microsoft (`com.microsoft.onnxruntime`); its jar holds the runtime."""

JAVASCRIPT = Language(
    name="javascript",
    title="JavaScript",
    build=((*NPM, "--omit=dev"),),
    run=("node", "src/main.js"),
    tools=("node", "npm"),
    refuses=_refuses_in_javascript,
)
"""With onnxruntime-node; the same program runs with onnxruntime-web in a browser, and has types."""

PYTHON = Language("python", "Python", build=(), run=(sys.executable, "main.py"), tools=(), refuses=_refuses_in_python)
"""Nothing is built, and what the program needs is installed where kvdoctor is."""

RUST = Language(
    name="rust",
    title="Rust",
    build=(("cargo", "build", *CARGO),),
    run=("cargo", "run", *CARGO, "--"),
    tools=("cargo",),
    refuses=_refuses_in_rust,
    environment={"ORT_DYLIB_PATH": "{onnxruntime}", "CARGO_TARGET_DIR": "target"},
)
"""With the crate `ort`: values go from step to step as the runtime made them."""

TYPESCRIPT = replace(
    JAVASCRIPT, name="typescript", title="TypeScript", program="javascript", build=(NPM, ("npx", "tsc"))
)
"""The program in JavaScript, whose types the compiler checks and writes as declarations."""

LANGUAGES = {one.name: one for one in (CPP, GO, JAVA, JAVASCRIPT, PYTHON, RUST, TYPESCRIPT)}
