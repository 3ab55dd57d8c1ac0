"""Consumers (Optimum, transformers, transformers.js, GenAI) decode what PyTorch decodes with the checkpoint.

They are given exports that kvdoctor repaired, converted or made, in environments with the pinned packages.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.isolated import EXPORTS, MERGED, Environment, call, give_up, kvdoctor, re_export
from support.sampling import first

from evidence.consumers.fixture_exports import NEW_TOKENS, environment, load_script, make_again
from kvdoctor.repair.export.exporters import find_exporter

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

SOUND = ("gpt2", "llama-gqa")
"""The fixtures with nothing to repair."""


def assert_same_export(made: Path, committed: Path) -> None:
    files = json.loads((committed / "provenance.json").read_text(encoding="utf-8"))["sha256"]
    assert {path.name for path in made.iterdir()} == {*files, "provenance.json"}
    for file in files:
        assert_same_file(made / file, committed / file)


def assert_same_file(made: Path, committed: Path) -> None:
    """Holds two files to be equal byte for byte, or ONNX graphs that differ in the rounding of constants alone.

    The exporter folds constants, so another processor may give other last bits.
    """
    if made.read_bytes() == committed.read_bytes():
        return
    assert made.suffix == ".onnx", f"{made.name} differs"
    models = [onnx.load(path) for path in (made, committed)]
    floats = [list(take_floats(model.graph)) for model in models]
    assert models[0] == models[1], f"{made.name} differs in more than its float tensors"
    for found, expected in zip(*floats, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def take_floats(graph: onnx.GraphProto) -> Iterator[np.ndarray[Any, Any]]:
    """Moves the values of all float tensors out of a graph."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    for tensor in (*graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            yield numpy_helper.to_array(tensor)
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
    for attribute in attributes:
        if attribute.HasField("g"):
            yield from take_floats(attribute.g)


@pytest.mark.parametrize("name", first([MERGED[-1], SOUND[-1], *MERGED[:-1], *SOUND[:-1]], 2))
def test_optimum_decodes_what_pytorch_decodes(name: str, tmp_path: Path) -> None:
    made, checkpoint = make_again(name, tmp_path)
    assert_same_export(made, EXPORTS / name)  # so the checkpoint is the one that the fixture was made from

    export, decoder = EXPORTS / name, "model.onnx"
    if name in MERGED:
        export, decoder = re_export(name, tmp_path / "repaired"), "decoder_model_merged.onnx"
        assert (export / decoder).read_bytes() != (EXPORTS / name / decoder).read_bytes()
    result = environment(name).run(HERE / "generate.py", export, checkpoint)

    expected = result["pytorch"]
    prompt = 1 if name in MERGED else 4
    assert [len(row) for row in expected] == [prompt + NEW_TOKENS] * 12
    assert len({tuple(row) for row in expected}) > 6, "the inputs must matter"
    assert Path(result["decoder"]).samefile(export / decoder)
    assert [run["io_binding"] for run in result["optimum"]] == [False, True]
    for run in result["optimum"]:
        assert run["tokens"] == expected
        assert run["cache_length"] == prompt + NEW_TOKENS - 1, "all but the last token went through the cache"
        assert run["distance"] <= 1e-5 * run["spread"]


ZOO = HERE.parent / "zoo"
transformers_exports = load_script(ZOO / "transformers_exports.py")
EXPORTER = Environment(
    transformers_exports.PYTHON, transformers_exports.REQUIREMENTS, ("torch", "transformers.exporters", "onnxscript")
)
TRANSFORMERS_JS = "@huggingface/transformers@4.3.1"


@pytest.fixture(
    scope="module", params=["t5", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("marian", "bart"))]
)
def exports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of an architecture, and the folder of its exports and its checkpoint."""
    EXPORTER.require()
    out: Path = tmp_path_factory.mktemp(request.param)
    done = call([*EXPORTER.command(), HERE / "with_encoder.py", ZOO, out, request.param])
    assert done.returncode == 0, done.stderr
    return request.param, out


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers.js in it."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("js")
    if npm is None or shutil.which("node") is None:
        give_up("there is no Node.js with npm")
    done = call([npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder, TRANSFORMERS_JS])
    if done.returncode:
        give_up(f"transformers.js cannot be installed: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.parametrize("where", ["beside", "inside"])
def test_an_export_of_transformers_runs_in_optimum_and_in_transformers_js(
    exports: tuple[str, Path], where: str, modules: Path, tmp_path: Path
) -> None:
    """The encoder is a file beside the pair, or inside the graph of the first step."""
    name, folder = exports
    out, checkpoint = tmp_path / "out", folder / "checkpoints" / name
    done = kvdoctor("convert", folder / f"{name}-{where}", "--layout", "optimum", "-o", out)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert {path.name for path in out.glob("*.onnx*")} == {"encoder_model.onnx", "decoder_model_merged.onnx"}

    result = environment("t5").run(HERE / "generate.py", out, checkpoint)
    expected = result["pytorch"]
    assert len({tuple(row) for row in expected}) > 2, "the inputs must matter"
    for found in result["optimum"]:
        assert found["tokens"] == expected
        assert found["cache_length"] == NEW_TOKENS
        assert found["distance"] <= 1e-5 * found["spread"]

    shutil.copytree(out, tmp_path / "js" / "onnx", ignore=shutil.ignore_patterns("*.json"))
    for config in (out / "config.json", checkpoint / "generation_config.json"):
        shutil.copy(config, tmp_path / "js")
    tokens = np.random.default_rng(99).integers(3, 126, (12, 9))  # as generate.py makes them
    given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    inputs = {
        key: {"type": "int64", "dims": value.shape, "data": value.ravel().tolist()} for key, value in given.items()
    }
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    arguments = (modules, tmp_path / "js", "AutoModelForSeq2SeqLM", tmp_path / "inputs.json", str(NEW_TOKENS))
    done = call(["node", HERE / "generate.mjs", *arguments])
    assert done.returncode == 0, done.stderr
    end = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    assert [to_end(row, end) for row in json.loads(done.stdout)] == [to_end(row, end) for row in expected]


def to_end(row: list[Any], end: int) -> list[Any]:
    """Tokens up to the end of the sentence: what follows while others go on is not the same in every runtime."""
    return row[: row.index(end, 1) + 1] if end in row[1:] else row


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
    OPTIMUM.run(HERE / "random_checkpoints.py", out, "marian", "t5", "bart", "whisper", "gpt2", "llama", "llama-genai")
    return out


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts for Node, and what they import."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            give_up(f"{program} is not on the path; it comes with https://nodejs.org")
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
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
    assert {entry["stack"] for entry in proof if entry["claim"] == "logits are those of PyTorch"} == stacks
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
    tokens: list[int] = OPTIMUM.run(HERE / "generate_pytorch.py", checkpoint, given, str(STEPS))
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
    decoded = OPTIMUM.run(HERE / "generate.py", tmp_path / "out", checkpoints / name)
    assert all(run["tokens"] == decoded["pytorch"] for run in decoded["optimum"])


def test_genai_decodes_what_pytorch_decodes(checkpoints: Path, tmp_path: Path) -> None:
    exported(checkpoints / "llama-genai", tmp_path / "out", "--exporter", "genai")
    given = inputs(checkpoints / "llama-genai", tmp_path)
    expected = pytorch(checkpoints / "llama-genai", given)
    assert GENAI.run(HERE / "generate_genai.py", tmp_path / "out", given, str(STEPS)) == expected


@pytest.mark.parametrize(
    "name", ["marian", *(pytest.param(name, marks=exhaustive) for name in ("t5", "bart", "whisper"))]
)
def test_what_the_exporter_of_transformers_freezes_is_free_when_made_here(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    frozen = tmp_path / "frozen"
    TRANSFORMERS.require()
    TRANSFORMERS.run(HERE / "export_frozen.py", checkpoints / name, frozen)
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
