"""Exports that `re-export --from` makes with the real exporters, run by real consumers: PyTorch's greedy tokens."""

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.isolated import CONSUMERS, EXPORTS, Environment, call, give_up

from kvdoctor.repair.export.exporters.registry import find_exporter

pytestmark = pytest.mark.slow

STEPS = 12
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
OPTIMUM = Environment(PYTHON, find_exporter("optimum").needs.requirements, ("torch", "transformers", "optimum"))
TRANSFORMERS = Environment(
    PYTHON, find_exporter("transformers").needs.requirements, ("torch", "transformers", "onnxscript")
)
GENAI = Environment(PYTHON, find_exporter("genai").needs.requirements, ("torch", "onnxruntime_genai"))
ENVIRONMENTS = {"optimum": OPTIMUM, "transformers": TRANSFORMERS, "genai": GENAI}
CLASSES = {"marian": "AutoModelForSeq2SeqLM", "t5": "AutoModelForSeq2SeqLM"}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints with random weights."""
    out = tmp_path_factory.mktemp("checkpoints")
    OPTIMUM.run("random_checkpoints.py", out, "marian", "t5", "bart", "whisper", "gpt2", "llama", "llama-genai")
    return out


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts for Node, and what they import."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            give_up(f"{program} is not on the path; it comes with https://nodejs.org")
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(CONSUMERS / "node", folder, dirs_exist_ok=True)
    npm = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--prefix", folder)
    done = call(npm)
    if done.returncode:
        give_up(f"npm install failed: {done.stderr.strip()[-300:]}")
    return folder


@cache
def exported(checkpoint: Path, out: Path, *options: str | Path) -> dict[str, Any]:
    """The report of an export made afresh, which must be proved."""
    ENVIRONMENTS[str(options[options.index("--exporter") + 1]) if "--exporter" in options else "optimum"].require()
    command = (*(sys.executable, "-m", "kvdoctor", "re-export"), *options)
    done = call((*command, "--from", checkpoint, "-o", out, "--format", "json"))
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["verdict"] == "healthy"
    proof = report["repair"]["proof"]
    assert all(entry["holds"] for entry in proof)
    stacks = {stack["name"] for stack in report["stacks"]}
    for claim in ("logits are those of PyTorch", "greedy tokens are those of PyTorch"):
        assert {entry["stack"] for entry in proof if entry["claim"] == claim} == stacks
    return report


def inputs(checkpoint: Path, folder: Path) -> Path:
    """What all consumers begin with."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    given = {
        "input_ids": [11, 54, 23, 98, 5],
        "start": config.get("decoder_start_token_id"),
        "class": "AutoModelForSeq2SeqLM" if config.get("is_encoder_decoder") else "AutoModelForCausalLM",
    }
    (folder / "inputs.json").write_text(json.dumps(given), encoding="utf-8")
    return folder / "inputs.json"


def pytorch(checkpoint: Path, given: Path) -> list[int]:
    """The tokens of PyTorch, which must not be one and the same."""
    tokens: list[int] = OPTIMUM.run("generate_pytorch.py", checkpoint, given, str(STEPS))
    assert len(tokens) == STEPS
    assert len(set(tokens)) > 2, tokens
    return tokens


def by_node(node: Path, script: str, export: Path, given: Path) -> Any:
    done = call(("node", node / script, export, given, str(STEPS)))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def for_transformers_js(export: Path, folder: Path) -> Path:
    """The export as transformers.js wants it: graphs in a folder of their own."""
    target = folder / "js"
    (target / "onnx").mkdir(parents=True)
    for path in (path for path in export.iterdir() if path.is_file()):
        shutil.copyfile(path, (target / "onnx" if ".onnx" in path.name else target) / path.name)
    return target


@pytest.mark.parametrize(
    "name", ["marian", pytest.param("gpt2", marks=exhaustive), pytest.param("llama", marks=exhaustive)]
)
def test_optimum_and_javascript_decode_what_pytorch_decodes(
    name: str, checkpoints: Path, node: Path, tmp_path: Path
) -> None:
    sick = EXPORTS / {"marian": "marian-4.46.3", "gpt2": "gpt2", "llama": "llama-gqa"}[name]
    report = exported(checkpoints / name, tmp_path / "out", sick)
    assert report["repair"]["export"]["exporter"] == "optimum"
    assert not report["repair"]["export"]["ports"]
    if name == "marian":
        assert {"cross-cache-emptied", "mask-not-offset"} <= {f["name"] for f in report["repair"]["before"]["findings"]}
    given = inputs(checkpoints / name, tmp_path)
    expected = pytorch(checkpoints / name, given)
    assert by_node(node, "plain_loop.mjs", tmp_path / "out", given) == expected
    assert by_node(node, "generate.mjs", for_transformers_js(tmp_path / "out", tmp_path), given) == expected
    decoded = OPTIMUM.run("generate.py", tmp_path / "out", checkpoints / name)
    assert all(run["tokens"] == decoded["pytorch"] for run in decoded["optimum"])


def test_genai_decodes_what_pytorch_decodes(checkpoints: Path, tmp_path: Path) -> None:
    exported(checkpoints / "llama-genai", tmp_path / "out", "--exporter", "genai")
    given = inputs(checkpoints / "llama-genai", tmp_path)
    expected = pytorch(checkpoints / "llama-genai", given)
    assert GENAI.run("generate_genai.py", tmp_path / "out", given, str(STEPS)) == expected


@pytest.mark.parametrize(
    "name", ["marian", *(pytest.param(name, marks=exhaustive) for name in ("t5", "bart", "whisper"))]
)
def test_what_the_exporter_of_transformers_freezes_is_free_when_made_here(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    frozen = tmp_path / "frozen"
    TRANSFORMERS.require()
    TRANSFORMERS.run("export_frozen.py", checkpoints / name, frozen)
    report = exported(checkpoints / name, tmp_path / "out", frozen)
    before = {finding["name"] for finding in report["repair"]["before"]["findings"]}
    assert "past-axis-frozen" in before
    assert report["repair"]["export"]["exporter"] == "transformers"
    sample = next(choice for choice in report["repair"]["export"]["choices"] if choice["what"] == "sample")
    assert "past-axis-frozen" in sample["because"]
    assert not report["findings"]
    assert {path.name for path in (tmp_path / "out").glob("*.onnx")} == {"encoder.onnx", "prefill.onnx", "decode.onnx"}


@exhaustive
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whisper", ["--exporter", "optimum"]),
        ("t5", ["--exporter", "optimum"]),
        ("llama", ["--exporter", "transformers"]),
        ("gpt2", ["--exporter", "transformers", "--opset", "18"]),
        ("llama", ["--exporter", "optimum", "--dtype", "fp16", "--opset", "17"]),
        ("llama", ["--exporter", "transformers", "--dtype", "fp16"]),
        ("marian", ["--exporter", "optimum", "--dtype", "fp16"]),
    ],
)
def test_other_exports_are_proved(name: str, options: list[str], checkpoints: Path, tmp_path: Path) -> None:
    report = exported(checkpoints / name, tmp_path / "out", *options)
    if "--opset" in options:
        decoder = next(file for file in report["model"]["files"] if "decoder" in file["role"])
        assert decoder["opsets"][""] == int(options[-1])
    if "fp16" in options:
        assert {slot["dtype"] for slot in report["stacks"][0]["contract"]["slots"]} == {"float16"}


def test_weights_that_do_not_fit_make_no_export(checkpoints: Path, tmp_path: Path) -> None:
    """Weights that are missing would be made up; code beside them is not run."""
    OPTIMUM.require()
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints / "gpt2", broken)
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    theirs = {**config, "n_layer": 3, "auto_map": {"AutoConfig": "mine.Config"}}
    (broken / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    (broken / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n", encoding="utf-8")
    command = (sys.executable, "-m", "kvdoctor", "re-export", "--from", broken, "-o", tmp_path / "out")
    done = call(command)
    assert done.returncode == 3
    assert "its weights do not fill GPT2LMHeadModel" in done.stdout
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "out.export-log.txt").stat().st_size
