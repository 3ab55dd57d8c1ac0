"""What transformers 5 exports runs in Optimum and transformers.js after `--layout optimum`, with PyTorch's tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fixture_exports import NEW_TOKENS, environment, load_script
from support.isolated import CONSUMERS, Environment, call, give_up, kvdoctor

pytestmark = pytest.mark.slow

ZOO = Path(__file__).parent / "zoo"
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
    done = call([*EXPORTER.command(), CONSUMERS / "with_encoder.py", ZOO, out, request.param])
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
    done = kvdoctor("re-export", folder / f"{name}-{where}", "--layout", "optimum", "-o", out)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert {path.name for path in out.glob("*.onnx*")} == {"encoder_model.onnx", "decoder_model_merged.onnx"}

    result = environment("t5").run("generate.py", out, checkpoint)
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
    done = call(["node", CONSUMERS / "generate.mjs", *arguments])
    assert done.returncode == 0, done.stderr
    end = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    assert [to_end(row, end) for row in json.loads(done.stdout)] == [to_end(row, end) for row in expected]


def to_end(row: list[Any], end: int) -> list[Any]:
    """Tokens up to the end of the sentence: what follows while others go on is not the same in every runtime."""
    return row[: row.index(end, 1) + 1] if end in row[1:] else row
