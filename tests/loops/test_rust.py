"""Rust: its linter and formatter, two models in one process, and what is special to the crate `ort`."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.isolated import EXPORTS, give_up, re_export
from support.loop_programs import calls, plan_of, program_text

from kvdoctor.addons.loops.check import build_cache, find_library
from kvdoctor.addons.loops.languages import RUST
from kvdoctor.addons.loops.pipeline import LoopRequest, write_loop
from kvdoctor.addons.loops.project import PROGRAMS
from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.process import NO_TELEMETRY
from kvdoctor.runtime.targets import ORT_CRATE

PLAIN = Path(__file__).parent / "plain_rust"
PROGRAM = PROGRAMS / "rust"
DYNAMIC = ("--quiet", "--no-default-features", "--features", "dynamic")
PROVIDERS = "coreml,cuda,directml,openvino,tensorrt,xnnpack"
TRACE_PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")


def cargo(folder: Path, *arguments: str, program: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run cargo in a project, with one folder for all builds; where it cannot fetch a package the test gives up."""
    if shutil.which("cargo") is None:
        give_up("cargo is not on the path; it comes with https://rustup.rs")
    target = os.environ.get("CARGO_TARGET_DIR") or str(build_cache() / "rust")
    settings = {"ORT_DYLIB_PATH": str(find_library()), "CARGO_TARGET_DIR": target, **NO_TELEMETRY}
    command = ["cargo", *arguments, *(("--", *program) if program else ())]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if any(sign in done.stderr for sign in ("failed to download", "failed to get", "no such command")):
        give_up(done.stderr[-300:])
    return done


def write(files: Mapping[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def written(model: str, folder: Path, name: str) -> Path:
    """The project for an export, under a name of its own."""
    made = write_loop(LoopRequest(str(EXPORTS / model), str(folder / name), "rust", name=name), Options())
    assert made.reason is None
    return folder / name


def test_the_release_that_is_pinned_is_the_newest_that_targets_have() -> None:
    manifest = (PROGRAM / "Cargo.toml").read_text(encoding="utf-8")
    assert f'ort = {{ version = "={list(ORT_CRATE)[-1]}"' in manifest


@pytest.mark.parametrize(("name", "reason"), [("past\0x", "NUL"), ("past\udc80", "UTF-8")])
def test_a_name_that_does_not_reach_the_runtime_is_refused(name: str, reason: str) -> None:
    plan = plan_of("gpt2")
    assert RUST.refuses(plan) is None
    decode = replace(plan.decode, pasts=(name, *plan.decode.pasts[1:]))
    slots = (replace(plan.slots[0], past=name), *plan.slots[1:])
    assert reason in (RUST.refuses(replace(plan, slots=slots, decode=decode)) or "")


@pytest.mark.slow
def test_the_program_is_formatted_and_clean_under_clippy(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PROGRAM, tmp_path / "program"))
    done = cargo(folder, "fmt", "--check")
    assert done.returncode == 0, done.stdout
    features = ("--release", "--all-targets", *DYNAMIC[:-1], f"dynamic,{PROVIDERS}")
    done = cargo(folder, "clippy", *features, program=("-D", "warnings"))
    assert done.returncode == 0, done.stderr


TWO_MODELS = """
[package]
name = "two_models"
version = "0.1.0"
edition = "2024"

[dependencies]
first_loop = { path = "../first_loop", default-features = false, features = ["dynamic"] }
second_loop = { path = "../second_loop", default-features = false }

[workspace]
"""


@pytest.mark.slow
def test_two_models_run_in_one_process(tmp_path: Path) -> None:
    """Two crates in one binary and one target folder; what cannot be right is refused and changes nothing."""
    models = {"first_loop": "llama-gqa", "second_loop": "marian-4.57.6"}
    contracts = [str(written(model, tmp_path, name) / "contract.json") for name, model in models.items()]
    main = program_text("two_models.rs")
    folder = write({"Cargo.toml": TWO_MODELS, "src/main.rs": main}, tmp_path / "two_models")
    places = (*(str(EXPORTS / model) for model in models.values()), *contracts)
    done = cargo(folder, "run", "--release", "--quiet", program=places)
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        given = calls([5, 6, 7], source=[[5, 6, 7]] if "marian" in model else None, most=6, stop=[])
        arguments = ("--model", str(EXPORTS / model), *given)
        alone = cargo(tmp_path / name, "run", "--release", *DYNAMIC, program=arguments)
        assert alone.returncode == 0, alone.stderr
        assert f"[[{alone.stdout.strip().replace(',', ', ')}]]" in done.stdout


@pytest.mark.slow
def test_a_plain_loop_fails_where_the_written_one_goes_on(tmp_path: Path) -> None:
    """The merged decoder whose second call returns an empty cross-attention cache; the plain loop has 2.0.0-rc.10."""
    sick, given = EXPORTS / "marian-4.57.6", ("5,6,7", "1", "6")
    repaired = re_export("marian-4.57.6", tmp_path / "repaired")
    plain = Path(shutil.copytree(PLAIN, tmp_path / "plain"))
    failed = cargo(plain, "run", "--quiet", program=(str(sick), *given))
    assert failed.returncode != 0
    assert len(failed.stdout.splitlines()) == 2
    assert "step 3:" in failed.stderr or failed.returncode < 0
    fixed = cargo(plain, "run", "--quiet", program=(str(repaired), *given))
    assert fixed.returncode == 0, fixed.stderr

    folder = written("marian-4.57.6", tmp_path, "goes_on")
    arguments = calls([1], source=[[5, 6, 7]], most=6, stop=[])
    runs = [
        cargo(folder, "run", "--release", *DYNAMIC, program=("--model", str(one), *arguments))
        for one in (sick, repaired)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.strip().split(",") == fixed.stdout.split()


SNIPPET_MANIFEST = """
[package]
name = "snippet"
version = "0.1.0"
edition = "2024"

[dependencies]
ort = { version = "=RELEASE", default-features = false, features = ["std", "load-dynamic"] }

[workspace]
"""


@pytest.mark.slow
@pytest.mark.parametrize("release", ["2.0.0-rc.10", list(ORT_CRATE)[-1]])
def test_the_lines_for_rust_write_a_trace(release: str, tmp_path: Path, runtime: Runtime) -> None:
    snippet = re.search(r"<!-- snippet: rust -->\n```rust\n(.+?)```", TRACE_PAGE, re.DOTALL)
    assert snippet is not None
    builder = "Session::builder()?" if release == "2.0.0-rc.10" else "Session::builder(&ort::init().build()?)?"
    program = program_text("traced.rs").replace("SNIPPET", snippet[1]).replace("SESSION", builder)
    write({"Cargo.toml": SNIPPET_MANIFEST.replace("RELEASE", release), "src/main.rs": program}, tmp_path)
    trace = tmp_path / "loop.jsonl"
    done = cargo(tmp_path, "run", "--quiet", program=(str(EXPORTS / "gpt2" / "model.onnx"), str(trace)))
    assert (done.returncode, done.stderr) == (0, "")
    report = step_test(str(EXPORTS / "gpt2"), Options(added=(TraceChoices(str(trace)),)), runtime)
    assert [finding for finding in report.findings if finding.code in ("KV208", "KV420")] == []
    assert any("4 steps of decoder compared with the contract, none breaks it" in note for note in report.notes)
