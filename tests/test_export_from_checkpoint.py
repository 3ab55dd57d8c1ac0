"""`re-export --from`: how an export is chosen, made, kept and proved; what is refused. The exporters are made up."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.bad_models import call, unchanged
from support.isolated import CONSUMERS, EXPORTS
from support.text_fixtures import load_all

from kvdoctor.diagnose import checkpoint as reference
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.errors import UsageError
from kvdoctor.options import Options, ReExportChoices
from kvdoctor.repair.export import run_exporter
from kvdoctor.repair.export.exporters import EXPORTERS, SourceFacts, find_exporter
from kvdoctor.repair.export.pipeline import export_from_checkpoint, refuse_impossible
from kvdoctor.repair.export.run_exporter import compare_ports, list_plans, read_source
from kvdoctor.repair.session import RepairRequest
from kvdoctor.report.document import Report, exit_code
from kvdoctor.report.markdown import render
from kvdoctor.runtime import environments
from kvdoctor.runtime.environments import Requirements

MERGED = EXPORTS / "marian-4.46.3"
SOUND = EXPORTS / "gpt2"
HEALTHY, CROSSED = "decoder-only-healthy", "layers-swapped"
"""Models of text fixtures: diagnosed within a second."""
HERE = Requirements(("numpy",), ("numpy",), "none")


def checkpoint(folder: Path, **config: Any) -> Path:
    """Write a folder that looks like a checkpoint to all but PyTorch."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts that need no PyTorch stand in for those that do."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copyfile(CONSUMERS / "made_up_exporter.py", scripts / run_exporter.RUN)
    for exporter in EXPORTERS:
        (scripts / exporter.script).touch()
    monkeypatch.setattr(run_exporter, "SCRIPTS", scripts)
    monkeypatch.setattr(environments, "python_command", lambda *_: (sys.executable,))
    monkeypatch.setattr(reference, "SCRIPT", CONSUMERS / "made_up_checkpoint.py")
    monkeypatch.setattr(reference, "transformers_for", lambda _config: HERE)


def small(folder: Path, name: str) -> Path:
    """Write the model of a text fixture as the export in a folder."""
    written = load_all()[name].write(folder / "written")
    export = folder / name
    shutil.copytree(written if written.is_dir() else written.parent, export)
    shutil.rmtree(folder / "written")
    return export


def left_in(folder: Path) -> set[str]:
    """What a call left beside the things that the test made."""
    return {path.name for path in folder.iterdir()} - {"checkpoint", "scripts", HEALTHY, CROSSED}


def exported(tmp_path: Path, path: Path | None = None, options: Options | None = None, **config: Any) -> Report:
    """The report of a made-up export into `tmp_path / "out"`."""
    source = checkpoint(tmp_path / "checkpoint", **config)
    export = ReExportChoices(from_=str(source))
    request = RepairRequest(str(path) if path else None, str(tmp_path / "out"), how=export)
    return export_from_checkpoint(request, options or Options())


# --- the whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_made_up")
def test_an_export_is_repaired_compared_with_the_checkpoint_and_written(tmp_path: Path) -> None:
    crossed = small(tmp_path, CROSSED)
    report = exported(tmp_path, copy=str(crossed))
    assert (report.verdict, exit_code(report, "error")) == ("healthy", 0)
    assert report.repair is not None
    assert report.repair.changes
    assert all(entry.holds for entry in report.repair.proof)
    assert {entry.claim for entry in report.repair.proof} >= {
        "layers-swapped is gone",
        "logits are those of PyTorch",
    }
    assert left_in(tmp_path) == {"out"}
    for name in ("kvdoctor-report.md", "kvdoctor-report.html"):
        assert "New export" in (tmp_path / "out" / name).read_text(encoding="utf-8")
    schema = json.loads(call("schema", "report").out)
    jsonschema.validate(json.loads((tmp_path / "out" / "kvdoctor-report.json").read_text(encoding="utf-8")), schema)


@pytest.mark.slow
@pytest.mark.usefixtures("_made_up")
def test_an_export_is_made_repaired_proved_and_written_with_its_recipe(tmp_path: Path) -> None:
    with unchanged(MERGED):
        report = exported(tmp_path, MERGED, copy=str(MERGED))
    assert report.repair is not None
    record, made = report.repair, report.repair.export
    assert made is not None
    assert (record.out, record.source) == (str(tmp_path / "out"), str(MERGED))
    assert {finding.name for finding in record.before.findings} >= {"cross-cache-emptied"}
    assert {finding.name for finding in made.findings} >= {"cross-cache-emptied"}
    assert "cross-cache-emptied" not in {finding.name for finding in report.findings}
    assert record.changes
    claims = {(entry.stack, entry.claim): entry.holds for entry in record.proof}
    assert all(claims.values())
    for stack in ("merged", "pair"):
        assert claims[stack, "logits are those of PyTorch"]
    assert (made.exporter, made.ports, made.left_out) == ("optimum", (), ())
    assert {choice.what for choice in made.choices} == {"exporter", "opset", "dtype", "merge"}
    recipe = tmp_path / "out" / "kvdoctor-export"
    written = {path.name for path in recipe.iterdir()}
    assert written == {"run.py", "with_optimum.py", "arguments.json", "requirements.txt", "command.txt", "log.txt"}
    assert "torch==" in (recipe / "requirements.txt").read_text(encoding="utf-8")
    assert json.loads((recipe / "arguments.json").read_text(encoding="utf-8"))["opset"] == 18
    assert "fills the log" in (recipe / "log.txt").read_text(encoding="utf-8")
    assert "New export" in render(report)
    assert left_in(tmp_path) == {"out"}


@pytest.mark.slow
@pytest.mark.usefixtures("_made_up")
def test_without_a_model_to_replace_and_without_a_repair_it_is_written_as_well(tmp_path: Path) -> None:
    healthy = small(tmp_path, HEALTHY)
    report = exported(tmp_path, copy=str(healthy))
    assert (report.verdict, exit_code(report, "error")) == ("healthy", 0)
    assert report.repair is not None
    assert report.repair.proved
    for file in healthy.glob("*.onnx"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert call("re-export", "--from", tmp_path / "checkpoint", "-o", tmp_path / "out").code == 2  # it exists
    assert call("inspect", tmp_path / "out").code == 0


@pytest.mark.usefixtures("_made_up")
def test_other_logits_than_the_checkpoint_write_nothing(tmp_path: Path) -> None:
    report = exported(tmp_path, copy=str(small(tmp_path, HEALTHY)), add_to_loop=0.5)
    assert report.repair is not None
    failed = [entry.claim for entry in report.repair.proof if not entry.holds]
    assert "logits are those of PyTorch" in failed
    assert [finding.name for finding in report.findings] == ["reference-differs"]
    assert exit_code(report, "error") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("_made_up")
def test_files_that_the_replaced_model_has_not_are_left_out(tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    shutil.copytree(MERGED, merged, ignore=shutil.ignore_patterns("decoder_model.onnx", "decoder_with_past*"))
    report = exported(tmp_path, merged, copy=str(MERGED))
    assert report.repair is not None
    assert report.repair.export is not None
    assert report.repair.export.left_out == ("decoder_model.onnx", "decoder_with_past_model.onnx")
    found = {path.name for path in (tmp_path / "out").glob("*.onnx")}
    assert found == {"decoder_model_merged.onnx", "encoder_model.onnx"}


def test_inputs_and_outputs_that_differ_are_named() -> None:
    known = read_source(inspect(str(SOUND)))
    files = inspect(str(EXPORTS / "llama-gqa")).model.files
    ports = {port.name: (port.before, port.after) for port in compare_ports(known, files)}
    assert ports == {
        f"{side}.{layer}.{part}": (f"float[batch_size, 4, {length}, 8]", f"float[batch_size, 2, {length}, 8]")
        for side, length in (
            ("past_key_values", "past_sequence_length"),
            ("present", "past_sequence_length + sequence_length"),
        )
        for layer in (0, 1)
        for part in ("key", "value")
    }
    assert not list(compare_ports(known, known.files))


# --- what cannot be made ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fail": "ValueError: no such kernel"}, "no such kernel"),
        ({"die": "out of memory, for example"}, "out of memory, for example"),
        ({"empty": True}, "wrote no ONNX file"),
        ({"fail": "CannotExport: its weights do not fill GPT2", "stage": "weights"}, "its weights do not fill GPT2"),
    ],
)
def test_an_exporter_that_fails_is_told_in_short_and_its_log_kept(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    report = exported(tmp_path, **config)
    assert (report.verdict, exit_code(report, "error")) == ("incomplete", 3)
    (entry,) = report.not_checked
    assert said in entry.reason
    assert len(entry.reason) < 1600
    assert re.search("; try --exporter|; give a checkpoint|wrote no ONNX", entry.reason)
    log = tmp_path / "out.export-log.txt"
    assert str(log) in entry.reason
    assert log.read_text(encoding="utf-8").count("a warning that fills the log") >= 50
    assert left_in(tmp_path) == {"out.export-log.txt"}


@pytest.mark.usefixtures("_made_up")
def test_weights_that_do_not_fit_are_not_tried_with_every_exporter(tmp_path: Path) -> None:
    report = exported(tmp_path, fail="CannotExport: no weights", stage="weights")
    assert "transformers" not in report.not_checked[0].reason.partition("the full log")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_made_up")
def test_where_one_exporter_fails_the_next_is_tried_and_that_is_told(tmp_path: Path) -> None:
    config = {"fail": "ValueError: an architecture that it does not know", "fail_with": {"script": "with_optimum.py"}}
    report = exported(tmp_path, copy=str(small(tmp_path, HEALTHY)), **config)
    assert report.repair is not None
    assert report.repair.export is not None
    assert report.repair.export.exporter == "transformers"
    assert "does not know" in report.repair.export.failures[0]
    assert not (tmp_path / "out" / "half.onnx").exists()


@pytest.mark.usefixtures("_made_up")
def test_a_sick_model_stays_unhealthy_where_no_export_can_be_made(tmp_path: Path) -> None:
    report = exported(tmp_path, small(tmp_path, CROSSED), fail="ValueError: no")
    assert (report.verdict, exit_code(report, "error")) == ("unhealthy", 1)
    assert report.findings


@pytest.mark.usefixtures("_made_up")
def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", copy=str(small(tmp_path, HEALTHY)))
    report = export_from_checkpoint(RepairRequest(None, None, how=ReExportChoices(from_=str(source))), Options())
    assert report.repair is not None
    assert report.repair.out is None
    assert any("nothing was written" in note for note in report.notes)
    assert not left_in(tmp_path)


def test_without_uv_the_report_says_how_to_install_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "find_uv", lambda: None)
    source = checkpoint(tmp_path / "checkpoint")
    export = ReExportChoices(from_=str(source), exporter="optimum")
    report = export_from_checkpoint(RepairRequest(None, str(tmp_path / "out"), how=export), Options())
    assert exit_code(report, "error") == 3
    assert "pip install uv, or pip install 'kvdoctor[optimum]'" in report.not_checked[0].reason
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]", encoding="utf-8"), "no model_type"),
        (lambda folder: (folder / "config.json").write_text("{}", encoding="utf-8"), "no model_type"),
        (shutil.rmtree, "is neither the folder of a checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_a_wrong_call(damage: Any, said: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    damage(folder)
    done = call("re-export", "--from", folder, "-o", tmp_path / "out")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_an_onnx_export_is_no_checkpoint(tmp_path: Path) -> None:
    done = call("re-export", "--from", SOUND, "-o", tmp_path / "out")
    assert done.code == 2
    assert "it holds an ONNX export (model.onnx)" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--exporter", "genai", "--opset", "18"], "writes an opset of its own choice"),
        (["--exporter", "transformers", "--opset", "17"], "writes 18 to"),
        (["--exporter", "transformers", "--dtype", "int4"], "writes fp32, fp16"),
        (["--exporter", "genai", "--task", "x"], "--task is for"),
        (["--exporter", "optimum", "--fusions", "webgpu"], "--fusions is for the exporter transformers"),
        (["--task", "x", "--static-cache", "64"], "--static-cache is for the exporter transformers"),
        (["--opset", "8"], "writes 18 to"),
    ],
)
def test_options_that_do_not_fit_are_a_wrong_call(options: list[str], said: str, tmp_path: Path) -> None:
    done = call("re-export", "--from", checkpoint(tmp_path / "checkpoint"), "-o", tmp_path / "out", *options)
    assert done.code == 2
    assert said in done.err


def test_options_of_an_export_need_a_checkpoint(tmp_path: Path) -> None:
    assert "give --from" in call("re-export", SOUND, "-o", tmp_path / "out", "--exporter", "optimum").err
    assert "give --from" in call("re-export", SOUND, "-o", tmp_path / "out", "--opset", "18").err
    assert "give PATH" in call("re-export", "-o", tmp_path / "out").err


def test_out_must_not_lie_in_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match="never changed"):
        refuse_impossible(RepairRequest(None, str(folder / "out")), str(folder), offline=True)


# --- how it is chosen -------------------------------------------------------------------------------------------------


def chosen(source: SourceFacts, **asked: Any) -> tuple[str, int | None, str, dict[str, Any]]:
    plan = next(list_plans(ReExportChoices(from_="checkpoint", **asked), source))
    for choice in plan.choices:
        assert choice.because
    return plan.exporter.name, plan.opset, plan.dtype, plan.flags


@pytest.mark.parametrize(
    ("source", "asked", "expected"),
    [
        (SourceFacts(), {}, ("optimum", None, "fp32")),
        (SourceFacts(), {"exporter": "genai", "dtype": "int4"}, ("genai", None, "int4")),
        (SourceFacts("a", ("optimum-merged",), (), 14, "float16"), {}, ("optimum", 14, "fp16")),
        (SourceFacts("a", ("transformers-pair",), (), 20, "float"), {}, ("transformers", 20, "fp32")),
        (SourceFacts("a", ("genai-decoder-only",), (), 22, "int8"), {}, ("genai", None, "fp32")),
        (SourceFacts("a", ("torch-decoder-only",), (), 23, "float"), {}, ("optimum", None, "fp32")),
        (SourceFacts("a", ("optimum-merged",), (), 18, "float"), {"opset": 21}, ("transformers", 21, "fp32")),
        (SourceFacts("a", ("optimum-merged",), (), 18, "float"), {"fusions": "webgpu"}, ("transformers", 18, "fp32")),
        (
            SourceFacts("a", ("optimum-merged",), (), 18, "float16"),
            {"dtype": "fp32", "opset": 17},
            ("optimum", 17, "fp32"),
        ),
    ],
)
def test_the_exporter_is_that_of_the_layout_unless_another_is_asked_for(
    source: SourceFacts, asked: dict[str, Any], expected: tuple[str, int | None, str]
) -> None:
    assert chosen(source, **asked)[:3] == expected


def test_a_pair_is_not_merged() -> None:
    pair = SourceFacts("a", ("optimum-pair",), ("decoder", "decoder-with-past"), 18, "float")
    assert chosen(pair)[3] == {"merge": False}
    assert chosen(SourceFacts("a", ("optimum-merged",), ("decoder-merged",), 18, "float"))[3] == {"merge": True}


def test_samples_freeze_no_axis() -> None:
    flags = chosen(SourceFacts("a", ("transformers-pair",), (), 20, "float", ("past-axis-frozen",)))[3]
    sizes = [flags[name] for name in ("rows", "prompt", "source", "decoder_tokens")]
    assert min(sizes) >= 2
    assert len({*sizes, 2}) == len(sizes) + 1
    assert (flags["fusions"], flags["static"]) == (None, None)
    asked = chosen(SourceFacts(), fusions="cpu", static_cache=64)[3]
    assert (asked["fusions"], asked["static"]) == ("cpu", 64)


def test_every_exporter_pins_what_it_needs() -> None:
    assert [exporter.name for exporter in EXPORTERS] == ["optimum", "transformers", "genai"]
    for exporter in EXPORTERS:
        assert all("==" in requirement for requirement in exporter.needs.requirements)
        assert (run_exporter.SCRIPTS / exporter.script).is_file()
    assert find_exporter("genai").opsets is None


def test_the_page_on_exporting_has_the_pins() -> None:
    page = (EXPORTS.parents[1] / "docs" / "export.md").read_text(encoding="utf-8")
    table = [row.split("|")[2:5] for row in page.splitlines() if row.startswith(("| writes", "| pinned", "| `--"))]
    for column, exporter in enumerate(EXPORTERS):
        cells = " ".join(row[column] for row in table)
        pins = dict(requirement.split("==") for requirement in exporter.needs.requirements)
        shown = dict(pin.split() for pin in table[1][column].split(","))
        assert shown.items() <= pins.items()
        assert ", ".join(exporter.dtypes) in cells
        span = exporter.opsets
        assert ("its own" if span is None else f"{span[0]} to {span[1]}") in cells


def test_what_is_known_of_a_diagnosed_model() -> None:
    known = read_source(inspect(str(MERGED)))
    assert known.facts.layouts == ("optimum-merged", "optimum-pair")
    assert (known.facts.opset, known.facts.dtype) == (18, "float")
    assert known.facts.faults[0] == "cross-cache-emptied"


# --- environments -----------------------------------------------------------------------------------------------------


def test_modules_are_looked_for_without_importing_them() -> None:
    here = Requirements((), ("json.decoder", "numpy"), "none")
    assert here.are_installed
    for absent in ("json.nowhere", "nowhere.at.all", "nowhere"):
        assert not Requirements((), ("json", absent), "none").are_installed


# --- killed -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def under_way(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An export under way whose exporter takes a minute, in a process of its own."""
    source = checkpoint(tmp_path / "checkpoint", copy=str(SOUND), wait=60)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copyfile(CONSUMERS / "made_up_exporter.py", scripts / run_exporter.RUN)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from kvdoctor.repair.export import run_exporter\nfrom kvdoctor.runtime import environments\n"
        "from kvdoctor.cli.main import main\n"
        f"run_exporter.SCRIPTS = Path({str(scripts)!r})\n"
        "environments.python_command = lambda *_: (sys.executable,)\n"
        f"sys.argv = ['kvdoctor', 're-export', '--from', {str(source)!r}, '-o', {str(tmp_path / 'out')!r}]\nmain()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.name != "posix", reason="needs the signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_killed_while_the_exporter_runs(number: signal.Signals, tmp_path: Path) -> None:
    import psutil

    with under_way(tmp_path) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.communicate(timeout=120)
        assert not (tmp_path / "out").exists()
    if number == signal.SIGINT:
        assert not list(tmp_path.glob(".out*"))
        _, alive = psutil.wait_procs(children, timeout=120)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
