"""The languages that loops are written in, an entry each: how the program of a language is built and run.

The C and C++ headers of ONNX Runtime, which its wheel lacks, are fetched from a package whose digest is known.
"""

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path

from kvdoctor.addons.loops.plan import CannotBuild, LoopPlan, list_names, nul_in, refuses_in_c
from kvdoctor.records import record

RELEASE, PACKAGE = "1.29", "com.github.asus4.onnxruntime@0.4.9"
"""The release of ONNX Runtime, and the package of npm that holds its headers."""
SHA512 = "BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg=="
INSIDE = "package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64_x86_64-simulator/onnxruntime.framework/Headers/"


class NoHeaders(CannotBuild):
    """The headers could not be had: the message says why."""


def fetch_headers(folder: Path) -> Path:
    """The folder with the headers; `folder` is a cache, which is filled whole or not at all.

    Raises:
        NoHeaders: npm is missing or fails, or the package is another one.
    """
    made = folder / f"onnxruntime-headers-{RELEASE}"
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = Path(scratch, "headers")
        unpacked.mkdir()
        _unpack(_packed(Path(scratch)), unpacked)
        try:
            unpacked.rename(made)
        except OSError:
            if not made.is_dir():  # else another process was faster
                raise
    return made


def _packed(scratch: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise NoHeaders("npm, which fetches the package with the headers, is not installed")
    command = [npm, "pack", "--silent", "--pack-destination", os.fspath(scratch), PACKAGE]
    done = subprocess.run(command, cwd=scratch, capture_output=True, encoding="utf-8", errors="replace", check=False)
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise NoHeaders(f"npm does not fetch {PACKAGE}: {done.stderr.strip()[-500:]}")
    if base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode() != SHA512:
        raise NoHeaders(f"{PACKAGE} does not have the SHA-512 that is written here")
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.removeprefix(INSIDE)
            content = members.extractfile(member)
            if name != member.name and name.endswith(".h") and "/" not in name and content is not None:
                (folder / name).write_bytes(content.read())
    if not (folder / "onnxruntime_cxx_api.h").is_file():
        raise NoHeaders(f"there is no onnxruntime_cxx_api.h in {INSIDE}")


def find_headers(cache: Path) -> dict[str, str]:
    """The headers next to the library of the wheel, where the environment names no release of its own.

    Those of JSON for Modern C++ are in a package that may be installed (`nlohmann-json`); else CMake fetches them.

    Raises:
        NoHeaders: they could not be had.
    """
    found = importlib.util.find_spec("nlohmann_json")
    made = {}
    if found is not None and found.origin is not None:
        made["NLOHMANN_JSON_INCLUDE"] = os.fspath(Path(found.origin).parent / "include")
    if any(os.environ.get(name) for name in ("ONNXRUNTIME_ROOT", "ONNXRUNTIME_INCLUDE")):
        return made
    return made | {"ONNXRUNTIME_INCLUDE": os.fspath(fetch_headers(cache))}


CARGO = ("--release", "--quiet", "--no-default-features", "--features", "dynamic")
"""The runtime is a shared library that is there: nothing is downloaded but crates."""
NPM = ("npm", "install", "--no-audit", "--no-fund", "--loglevel=error")
JAVASCRIPT_DTYPES = {
    *("float", "double", "float16", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
"""The element types that onnxruntime-common has."""


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
    prepare: Callable[[Path], Mapping[str, str]] = lambda _: {}
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
    unread = "bfloat16" in (plan.prefill.logits_type, plan.decode.logits_type)
    return "the logits have element type bfloat16, which onnxruntime for Python cannot read" if unread else None


def _refuses_in_rust(plan: LoopPlan) -> str | None:
    name = next((name for name in list_names(plan) if any("\ud800" <= char <= "\udfff" for char in name)), None)
    return refuses_in_c(plan) if name is None else f"the name {name!r} is not UTF-8, as Rust's strings are"


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
