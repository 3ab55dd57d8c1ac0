"""The program in Go: its form, several models in one process, and what its library refuses."""

from pathlib import Path

import pytest
from support.loop_programs import Program, assert_a_trace_is_accepted, materials, program, program_text, snippet
from test_programs import scratch

from kvdoctor.addons.loops.contract_file import CONTRACT_FILE

pytestmark = pytest.mark.slow
assert scratch  # a fixture

REFUSALS = """\
128 is no token id
-1 is no token id
tokens of 2 sequences for a cache of 1
there is nothing in it
tokens of 0 sequences for a cache of 1
at most 64 tokens
cannot forget 3 of 3 tokens
begins with at least one token
no choice
call Encode before Prefill
and there is one; got [[5 -1]]
and there is one; got []
1 prompts for 2 sources
"""


def start(built: Program, *command: object) -> str:
    done = built.start(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_program_is_formatted_and_clean(scratch: Path) -> None:
    built = program("go", scratch)
    assert start(built, "gofmt", "-l", ".") == ""
    start(built, "go", "vet", "./...")
    start(built, "go", "mod", "verify")


def test_two_models_decode_in_one_process_and_failures_change_nothing(scratch: Path) -> None:
    built, given = program("go", scratch), [materials(name, scratch) for name in ("llama-gqa", "marian-4.46.3")]
    (built.folder / "uses").mkdir()
    (built.folder / "uses" / "main.go").write_text(program_text("uses.go"))
    paths = [path for one in given for path in (one.model, one.folder / CONTRACT_FILE)]
    said = start(built, "go", "run", "./uses", *paths)
    for line, expected in zip(said.splitlines(), REFUSALS.splitlines(), strict=True):
        assert expected in line


def test_the_lines_for_go_write_a_trace(scratch: Path, tmp_path: Path) -> None:
    built, llama = program("go", scratch), materials("llama-gqa", scratch)
    (built.folder / "snippet").mkdir()
    (built.folder / "snippet" / "main.go").write_text(program_text("traced.go").replace("// SNIPPET\n", snippet("go")))
    assert start(built, "gofmt", "-l", "snippet") == ""
    trace = tmp_path / "loop.jsonl"
    start(built, "go", "run", "./snippet", llama.model / "model.onnx", trace)
    assert_a_trace_is_accepted(llama.model, trace, steps=4)
