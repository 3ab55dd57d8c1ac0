"""`kvdoctor loop` on the command line: what is written, what is refused, and what is never touched."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import bad_models as bad
from support import text_fixtures
from support.isolated import EXPORTS, kvdoctor
from support.loop_programs import calls

MARIAN, LLAMA = EXPORTS / "marian-4.57.6", EXPORTS / "llama-gqa"


def test_a_project_is_written_and_its_program_decodes(tmp_path: Path) -> None:
    out = tmp_path / "decode"
    done = kvdoctor("loop", MARIAN, "--language", "python", "-o", out)
    assert done.returncode == 0, done.stderr
    assert "loop keeps the cross-attention cache of the first call" in " ".join(done.stdout.split())
    names = {path.name for path in out.iterdir()}
    own = {"README.md", "kvdoctor-loop.json", "contract.json", "vectors.json"}
    assert names == own | {"decode_loop", "main.py", "pyproject.toml"}
    ran = program(out, MARIAN, *calls([5, 6], source=[[5, 6, 7]]))
    assert (ran.returncode, ran.stderr) == (0, "")
    readme = (out / "README.md").read_text("utf-8")
    assert "KV203" in readme
    assert "`present.0.encoder.key`" in readme
    assert "@" not in readme


def test_a_readme_has_what_the_contract_has(tmp_path: Path) -> None:
    def readme(model: Path) -> str:
        out = tmp_path / f"loop-{model.name}"
        assert kvdoctor("loop", model, "-l", "python", "-o", out, "-q").returncode == 0
        return (out / "README.md").read_text("utf-8")

    whole = readme(LLAMA)
    assert [part in whole for part in ("**Beams**", "**A second turn**", "**The source**")] == [True, True, False]
    assert "KV203" not in whole
    assert "padded on the left" in whole
    one_row = readme(text_fixtures.load_all()["layout-states-of-all-kinds-one-token-healthy"].write(tmp_path / "model"))
    assert "**A second turn**" not in one_row
    assert "It cannot go back" in one_row
    assert ("decoder.rewind" in whole, "decoder.rewind" in one_row) == (True, False)


WITHOUT_A_CACHE = """
import sys
import numpy as np
import onnxruntime as ort
folder = sys.argv[1]
encoder = ort.InferenceSession(f"{folder}/encoder_model.onnx")
decoder = ort.InferenceSession(f"{folder}/decoder_model.onnx")
ids = np.array([[5, 6, 7, 8, 9, 10, 11]])
mask = np.ones_like(ids)
states = encoder.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})[0]
tokens = [3]
for _ in range(8):
    feeds = {"input_ids": np.array([tokens]), "encoder_hidden_states": states, "encoder_attention_mask": mask}
    tokens.append(int(decoder.run(["logits"], feeds)[0][0, -1].argmax()))
print(*tokens[1:], sep=",")
"""
"""What the model means by a file that takes no cache, without a line of kvdoctor."""


def test_greedy_decoding_is_that_of_the_file_that_takes_no_cache(tmp_path: Path) -> None:
    out, folder = tmp_path / "decode", EXPORTS / "marian-4.46.3"
    kvdoctor("loop", folder, "-l", "python", "-o", out)
    words = calls([3], source=[[5, 6, 7, 8, 9, 10, 11]], most=8)
    without = [sys.executable, "-c", WITHOUT_A_CACHE, str(folder)]
    expected = subprocess.run(without, capture_output=True, text=True, check=True).stdout
    assert program(out, folder, *words).stdout == expected


def test_the_trace_of_a_program_breaks_no_rule(tmp_path: Path) -> None:
    out, trace = tmp_path / "decode", tmp_path / "loop.jsonl"
    kvdoctor("loop", MARIAN, "-l", "python", "-o", out)
    program(out, MARIAN, *calls([1], source=[[5, 6, 7]], most=4), trace=trace)
    done = kvdoctor("step-test", MARIAN, "--consumer", "held", "--trace", trace, "--format", "json")
    assert done.returncode == 0
    assert not [f for f in json.loads(done.stdout)["findings"] if f["severity"] != "note"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("-l", "cobol", "-o", "out"), 2, "there is no loop in 'cobol'"),
        (("-l", "pyhton", "-o", "out"), 2, "did you mean 'python'?"),
        (("-l", "python"), 2, "give the folder for the program with -o OUT"),
        (("-l", "python", "-o", "out", "--stack", "none"), 2, "there is no stack 'none'"),
        (("-l", "python", "-o", str(MARIAN / "loop")), 2, "lies in the folder of the model"),
        (("-o", "out"), 2, "Missing option '-l' / '--language'"),
        (("-l", "python", "-o", "out", "--name", "Decode-Loop"), 2, "must be at most 40 small letters"),
    ],
)
def test_wrong_usage_writes_nothing(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvdoctor("loop", MARIAN, *words)
    assert done.returncode == code
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_only_an_unchanged_loop_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "decode"
    assert kvdoctor("loop", LLAMA, "-l", "python", "-o", out).returncode == 0
    assert kvdoctor("loop", LLAMA, "-l", "python", "-o", out).returncode == 2
    assert kvdoctor("loop", LLAMA, "-l", "python", "-o", out, "--force").returncode == 0
    (out / "target").mkdir()
    (out / "target" / "built").write_text("can be built again")
    assert kvdoctor("loop", LLAMA, "-l", "python", "-o", out, "--force").returncode == 0
    (out / "beams.py").write_text("# mine\n")
    done = kvdoctor("loop", LLAMA, "-l", "python", "-o", out, "--force")
    assert (done.returncode, (out / "beams.py").is_file()) == (2, True)
    assert "'beams.py'" in done.stderr
    (out / "beams.py").unlink()
    with (out / "decode_loop" / "decoder.py").open("a") as file:
        file.write("# mine\n")
    done = kvdoctor("loop", LLAMA, "-l", "python", "-o", out, "--force")
    assert (done.returncode, "'decode_loop/decoder.py'" in done.stderr) == (2, True)
    assert (out / "decode_loop" / "decoder.py").read_text().endswith("# mine\n")


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "decode"
    assert kvdoctor("loop", LLAMA, "-l", "python", "-o", out).returncode == 0
    monkeypatch.chdir(out)
    done = kvdoctor("loop", LLAMA, "-l", "python", "-o", ".", "--force")
    assert done.returncode == 2
    assert "the folder that you are in" in done.stderr


@pytest.mark.parametrize(
    ("fixture", "said"),
    [
        ("batch-rows-interact-count", "several sequences at once: wrong with this model"),
        pytest.param("batch-rows-interact", "several sequences at once: wrong with this model", marks=pytest.mark.slow),
        ("padding-changes-logits", "prompts of unequal length: wrong with this model"),
        pytest.param(
            "chunk-differs", "several new tokens on top of a cache: wrong with this model", marks=pytest.mark.slow
        ),
    ],
)
def test_a_use_that_is_wrong_is_not_offered(fixture: str, said: str, tmp_path: Path) -> None:
    folder, out = text_fixtures.load_all()[fixture].write(tmp_path / "model"), tmp_path / "decode"
    done = kvdoctor("loop", folder, "-l", "python", "-o", out, "--check")
    assert done.returncode == 0
    assert said in done.stdout
    ran = program(out, folder, *calls([1, 2, 3], [3, 4]))
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: ")


def test_features_are_refused_by_name(tmp_path: Path) -> None:
    folder, out = text_fixtures.load_all()["layout-vision-bundle-healthy"].write(tmp_path / "model"), tmp_path / "loop"
    done = kvdoctor("loop", folder, "-l", "python", "-o", out)
    assert "input 'pixel_values' is for images or audio, which this loop does not take" in done.stdout
    assert program(out, folder, *calls([1, 14], most=2)).returncode == 0
    ran = program(out, folder, *calls([1, 15], most=2))
    assert (ran.returncode, "token 15 stands for an image" in ran.stderr) == (1, True)


def test_a_check_that_compares_nothing_is_none(tmp_path: Path) -> None:
    """All logits are zero: no token is likelier than another."""
    model = onnx.load(EXPORTS / "gpt2" / "model.onnx")
    (head,) = (node for node in model.graph.node if "logits" in node.output)
    head.output[0] = "scores"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.float32), "nothing"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["scores", "nothing"], ["logits"], name="nothing"))
    done = kvdoctor("loop", bad.saved(model, tmp_path / "model"), "-l", "python", "--check")
    assert done.returncode == 3
    assert "not checked: in no call without a cache one token is clearly likelier" in done.stdout


def test_names_of_a_model_are_data(tmp_path: Path) -> None:
    """Quotes, line ends, braces and 10,000 characters in the names of inputs and outputs decode as they are."""
    names = {
        "past_key_values.0.key": 'a"b\'c\\d${x}{{ y }}\n"""\r#*/' + "k" * 10_000,
        "past_key_values.0.value": "class\t\u4f60\U0001f600\0",
        "present.0.key": "{% raw %}\u2028import os",
        "present.0.value": "`$(touch owned)`",
    }
    folder, out = (
        bad.saved(bad.renamed(onnx.load(EXPORTS / "gpt2" / "model.onnx"), names), tmp_path / "model"),
        tmp_path / "decode",
    )
    done = kvdoctor("loop", folder, "-l", "python", "-o", out)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = program(out, folder, "--record", "loop.jsonl")
    assert ran.stdout.startswith("one-sequence: as expected\n"), ran.stdout + ran.stderr
    assert not (out / "owned").exists()


def test_what_is_no_model_has_no_loop(tmp_path: Path) -> None:
    model = bad.saved(np.random.default_rng(0).bytes(1000), tmp_path / "model")
    done = kvdoctor("loop", model, "-l", "python", "-o", tmp_path / "out")
    assert done.returncode == 3
    assert "cannot be read: " in done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def program(folder: Path, model: Path, *words: str, trace: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the program of a loop in Python, as its README says, with the packages of the tests."""
    command = [sys.executable, "main.py", "--model", str(model), *words]
    command += [] if trace is None else ["--record", str(trace)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
