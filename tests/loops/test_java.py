"""The program in Java: its form, several models in one process, and what its library refuses."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.loop_programs import Program, assert_a_trace_is_accepted, materials, plan_of, program, program_text
from test_programs import scratch

from kvdoctor.addons.loops.contract_file import CONTRACT_FILE
from kvdoctor.addons.loops.languages import JAVA
from kvdoctor.addons.loops.plan import LoopPlan

assert scratch  # a fixture
FORMATTER = "com.google.googlejavaformat:google-java-format:1.28.0:jar:all-deps"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
REFUSALS = """\
token ids are 0 to 127; got 128
token ids are 0 to 127; got -1
a step takes tokens for each of 1 sequences
each sequence needs at least one token
there is nothing in it
at most 64 tokens
cannot forget 3 of 3 tokens
each sequence needs at least one token
no choice after [5, 6, 7]
begin with encode()
the ids of the source are 0 or more
the mask of this source has the shape [2, 3]
1 prompts for 2 sources
"""


def with_output(name: str) -> LoopPlan:
    plan = plan_of("llama-gqa")
    return replace(plan, decode=replace(plan.decode, outputs=(*plan.decode.outputs, name)))


def test_names_that_the_binding_does_not_find_are_refused() -> None:
    assert JAVA.refuses(plan_of("llama-gqa")) is None
    assert "modified UTF-8" in str(JAVA.refuses(with_output("\U0001f600")))
    assert "NUL" in str(JAVA.refuses(with_output("a\0b")))
    assert "the very memory" in str(JAVA.refuses(with_output("input_ids")))


def start(built: Program, *command: object) -> str:
    done = built.start(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_program_compiles_without_warnings_and_is_formatted(scratch: Path, tmp_path: Path) -> None:
    built = program("java", scratch)
    start(built, "mvn", "-q", "clean", "package", "-Dmaven.compiler.failOnWarning=true")
    fetched = built.start("mvn", "-q", COPY, f"-Dartifact={FORMATTER}", f"-DoutputDirectory={tmp_path}")
    if fetched.returncode:
        pytest.skip(f"Maven has no {FORMATTER}: {fetched.stdout[-300:]}")
    command = ("java", "-jar", next(tmp_path.glob("*.jar")), "--dry-run", *built.folder.rglob("*.java"))
    assert start(built, *command) == ""


def ran(text: str, name: str, built: Program, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """What a class does that uses the jar of the program."""
    folder = built.folder / name
    folder.mkdir()
    (folder / f"{name}.java").write_text(text, encoding="utf-8")
    classes = "target/decode-loop.jar:target/lib/*"
    start(built, "javac", "-Xlint:all", "-Werror", "-cp", classes, "-d", folder, folder / f"{name}.java")
    return built.start("java", "-cp", f"{name}:{classes}", name, *arguments)


@pytest.mark.slow
def test_two_models_decode_in_one_process_and_failures_change_nothing(scratch: Path) -> None:
    built, given = program("java", scratch), [materials(name, scratch) for name in ("llama-gqa", "marian-4.46.3")]
    paths = [path for one in given for path in (one.model, one.folder / CONTRACT_FILE)]
    done = ran(program_text("Uses.java"), "Uses", built, *paths)
    assert done.returncode == 0, done.stderr
    for line, expected in zip(done.stdout.splitlines(), REFUSALS.splitlines(), strict=True):
        assert expected in line


@pytest.mark.slow
def test_the_lines_for_java_write_a_trace(scratch: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- snippet: java -->\n```java\n(.+?^}\n)(.+?)```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    text = program_text("Traced.java").replace("FUNCTION", found[1]).replace("STATEMENTS", found[2])
    llama, trace = materials("llama-gqa", scratch), tmp_path / "loop.jsonl"
    done = ran(text, "Traced", program("java", scratch), llama.model / "model.onnx", trace)
    assert done.returncode == 0, done.stderr
    assert_a_trace_is_accepted(llama.model, trace, steps=4)
