"""Reads the hand-written models under fixtures/text: ONNX text with the findings it must bring.

A fixture begins with comment lines:

    # twin: NAME                        the healthy fixture that it differs from by one fault
    # file: NAME                        the file that the text from here on becomes; there may be several, and what
                                        has not the suffix .onnx is written as it stands
    # expect: CHECK SEVERITY SUBJECT    a finding of the step test, with its first subject; or `none`
    # expect-inspect: ...               the same for the inspection, which finds nothing where this is left out
    # expect-not-checked: CODE          what must be listed as not checked, and nothing else; left out: not looked at
    # says: TEXT                        text that the findings of the step test hold
    # trace: FILE                       the step test is given this file of the fixture as what the caller's loop did
    # platform: MACHINE                 the only machine it is meant for
    # option: thorough                  the step test is thorough
    # require: USE                      a use that must work
    # metadata: NODE KEY VALUE          metadata of the nodes of that name; VALUE is a text as JSON writes it
    # target: SPEC                      a target, of which nothing but the table of limits is there

A fixture whose name ends in `healthy` has no fault; a use that its layout does not allow may still be a warning.

A value declared as `w_...` in the list after the outputs becomes a weight of noise, seeded by its name, so that a
fixture and its twin hold the same weights; `w_x__again` is a copy of `w_x`.

`python tests/support/text_fixtures.py NAME FOLDER` compiles one into a folder.
"""

import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import parser
from onnx.numpy_helper import from_array

FOLDER = Path(__file__).parents[2] / "fixtures" / "text"
FILE = re.compile(r"^# file: (\S+)$", re.MULTILINE)
DIRECTIVE = re.compile(
    r"^# (?P<key>twin|platform|option|require|trace|target|metadata|says|expect(?:-inspect|-not-checked)?): "
    r"(?P<value>.+?)\s*$",
    re.MULTILINE,
)
SPREAD = 0.5
"""Standard deviation of the weights: logits well apart, attention neither uniform nor saturated."""


@dataclass(frozen=True)
class Expected:
    """One finding: its name, its severity and the first of its subjects, which may hold blanks."""

    name: str
    severity: str
    subject: str

    def __str__(self) -> str:
        return f"{self.name} {self.severity} {self.subject}"


@dataclass(frozen=True)
class Fixture:
    """One text: the files it becomes, and what the diagnosis must say of them."""

    name: str
    files: dict[str, str]
    expect: tuple[Expected, ...]
    expect_inspect: tuple[Expected, ...]
    not_checked: tuple[str, ...]
    twin: str | None
    platform: str | None
    thorough: bool
    trace: str | None
    targets: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    metadata: tuple[tuple[str, str, str], ...] = ()
    says: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether the name says that the report must be healthy."""
        return self.name.endswith("healthy")

    def write(self, folder: Path) -> Path:
        """Compile the files into a folder."""
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".onnx":
                model = compile_text(text)
                for named, key, value in self.metadata:
                    for node in model.graph.node:
                        if node.name == named:
                            node.metadata_props.add(key=key, value=value)
                path.write_bytes(model.SerializeToString(deterministic=True))
            else:
                path.write_text(text, encoding="utf-8")
        return folder


def compile_text(text: str) -> onnx.ModelProto:
    """Parse ONNX text, and give the weights their noise."""
    model = parser.parse_model(text)
    graph = model.graph
    weights = [value for value in graph.value_info if value.name.startswith("w_")]
    for value in weights:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        noise = (
            np.random.default_rng(zlib.crc32(value.name.removesuffix("__again").encode())).standard_normal(shape)
            * SPREAD
        )
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        graph.initializer.append(from_array(noise.astype(kind), value.name))
        graph.value_info.remove(value)
    return model


def read(path: Path) -> Fixture:
    """Read one fixture."""
    head, *rest = FILE.split(path.read_text(encoding="utf-8"))
    directives: dict[str, list[str]] = {}
    for found in DIRECTIVE.finditer("\n".join((head, *rest[1::2]))):
        directives.setdefault(found["key"], []).append(found["value"])
    return Fixture(
        name=path.stem,
        files=dict(zip(rest[::2], rest[1::2], strict=True)),
        expect=_expected(directives["expect"]),
        expect_inspect=_expected(directives.get("expect-inspect", ["none"])),
        not_checked=tuple(directives.get("expect-not-checked", ())),
        twin=directives.get("twin", [None])[0],
        platform=directives.get("platform", [None])[0],
        thorough=directives.get("option") == ["thorough"],
        trace=directives.get("trace", [None])[0],
        targets=tuple(directives.get("target", ())),
        require=tuple(directives.get("require", ())),
        metadata=tuple(_metadata(line) for line in directives.get("metadata", ())),
        says=tuple(directives.get("says", ())),
    )


@cache
def load_all() -> Mapping[str, Fixture]:
    """Every fixture by name."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.onnxtxt"))}


def _metadata(line: str) -> tuple[str, str, str]:
    node, key, value = line.split(maxsplit=2)
    return node, key, json.loads(value)


def _expected(lines: list[str]) -> tuple[Expected, ...]:
    return tuple(Expected(*line.split(maxsplit=2)) for line in lines if line != "none")


if __name__ == "__main__":
    read(FOLDER / f"{sys.argv[1]}.onnxtxt").write(Path(sys.argv[2]))
