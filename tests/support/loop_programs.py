"""Writes loops and runs their programs."""

import fcntl
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdoctor.addons.loops.check import build
from kvdoctor.addons.loops.languages import LANGUAGES
from kvdoctor.addons.loops.make_plan import make_plan
from kvdoctor.addons.loops.pipeline import LoopRequest, WrittenLoop, write_loop
from kvdoctor.addons.loops.plan import CannotBuild, LoopPlan
from kvdoctor.addons.loops.project import CONTRACT_FILE, VECTORS_FILE
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.calls import MOST_DATA
from kvdoctor.options import Options
from support import text_fixtures
from support.isolated import EXPORTS, kvdoctor

Done = subprocess.CompletedProcess[str]

COMMITTED = ("marian-4.46.3", "marian-4.57.6", "t5", "whisper", "gpt2", "llama-gqa")
"""The fixtures that loops are built for."""


def plan_of(model: str | Path, stack: str | None = None) -> LoopPlan:
    """What a loop must do for a model, or for the export of a name: for its first stack or the named one."""
    folder = open_folder(EXPORTS / model)
    chosen = next(one for one in folder.stacks if stack in (None, one.name))
    return make_plan(read_contract(chosen, folder.side_cars), Path(model).name)


def written(model: Path, language: str = "python", out: Path | None = None) -> WrittenLoop:
    """The loop for a model, its program held to the test vectors."""
    request = LoopRequest(str(model), None if out is None else str(out), language, check=True)
    return write_loop(request, Options())


@contextmanager
def one_at_a_time(language: str) -> Iterator[None]:
    """Lets one process of the tests build in a language: not every tool shares its cache of packages with another."""
    with (Path(tempfile.gettempdir()) / f"kvdoctor-tests-{language}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Program:
    """A program that was built, in its folder."""

    language: str
    folder: Path
    environment: dict[str, str]

    def run(self, *words: object) -> Done:
        return self.start(*LANGUAGES[self.language].run, *words)

    def start(self, *command: object) -> Done:
        line, given = [str(one) for one in command], {"cwd": self.folder, "env": self.environment}
        return subprocess.run(line, **given, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Materials:
    """A model, and the folder with the contract and the vectors that a loop for it has."""

    model: Path
    folder: Path

    def edited(self, folder: Path, **changes: Any) -> Path:
        """Another contract with other values of its first level."""
        document = json.loads((self.folder / CONTRACT_FILE).read_text("utf-8")) | changes
        (folder / CONTRACT_FILE).write_text(json.dumps(document), "utf-8")
        return folder / CONTRACT_FILE

    @property
    def contract(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / CONTRACT_FILE).read_text("utf-8"))
        return document


@cache
def materials(name: str | Path, scratch: Path) -> Materials:
    """What `kvdoctor loop` writes for an export, a text fixture, or the model at a path, made once."""
    folder = scratch / (name if isinstance(name, str) else "-".join(name.parts[-2:]))
    folder.mkdir()
    if isinstance(name, Path) or name in COMMITTED:
        model = EXPORTS / name
    else:
        model = text_fixtures.load_all()[name].write(folder / "model")
    made = write_loop(LoopRequest(str(model), str(folder / "loop"), "python"), Options())
    assert made.reason is None
    return Materials(model, folder / "loop")


@cache
def program(language: str, scratch: Path) -> Program:
    """The program of a language, built once; a skip where its tools are missing."""
    folder = scratch / f"{language}-program"
    made = write_loop(LoopRequest(str(EXPORTS / "llama-gqa"), str(folder), language), Options())
    assert made.reason is None
    with one_at_a_time(language):
        try:
            environment = build(folder, LANGUAGES[language])
        except CannotBuild as reason:
            if "not found" not in str(reason):
                raise
            pytest.skip(str(reason))
    return Program(language, folder, environment)


def played(language: str, name: str | Path, scratch: Path) -> Done:
    """The runs of a model, played by the program."""
    made, built = materials(name, scratch), program(language, scratch)
    given = ("--contract", made.folder / CONTRACT_FILE, "--runs", made.folder / VECTORS_FILE)
    return built.run("--model", made.model, *given, "--record", made.folder / f"{language}.jsonl")


def assert_a_trace_is_accepted(model: Path, trace: Path, steps: int | None = None) -> None:
    """`kvdoctor step-test --trace` reads it and finds no step that breaks the contract."""
    done = kvdoctor("step-test", model, "--consumer", "held", "--trace", trace, "--format", "json")
    report = json.loads(done.stdout)
    assert not [found for found in report["findings"] if found["code"] in ("KV208", "KV420")], done.stdout
    assert "none breaks it" in done.stdout
    if steps is not None:
        assert f"{steps} steps of" in done.stdout


def assert_tensors_are_noted(lines: list[dict[str, Any]]) -> None:
    """Small tensors have their data, larger ones a sample."""
    tensors = [t for line in lines if "fed" in line for t in (*line["fed"].values(), *line["got"].values())]
    sizes = {int(np.prod(tensor["shape"])) for tensor in tensors}
    assert max(sizes) > MOST_DATA >= min(sizes)
    for tensor in tensors:
        size = int(np.prod(tensor["shape"]))
        assert ("data" in tensor, "sample" in tensor) == (size <= MOST_DATA, size > MOST_DATA)
        assert len(tensor.get("data") or tensor.get("sample") or []) == min(size, MOST_DATA)


def calls(*rows: list[int], source: list[list[int]] | None = None, **how: Any) -> tuple[str, str]:
    """Options of a program that generates from prompts, after an encoder has read a source."""
    encoded = [] if source is None else [{"call": "encode", "rows": source}]
    return "--calls", json.dumps([*encoded, {"call": "generate", "rows": list(rows), **how}])


def program_text(name: str) -> str:
    """A program of `tests/loops/programs`, or what it must print."""
    return (Path(__file__).parents[1] / "loops" / "programs" / name).read_text("utf-8")


def snippet(language: str) -> str:
    """The lines of docs/trace.md that write a trace."""
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text("utf-8")
    found = re.search(rf"<!-- snippet: {language} -->\n```\w+\n(.+?)```", page, re.DOTALL)
    assert found is not None
    return found[1]
