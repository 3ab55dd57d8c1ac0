"""The program of each language: built once, it decodes every fixture by its contract, and refuses what it cannot do.

A skip says which tools are missing.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import make_loops
import pytest
from support.isolated import EXPORTS, kvdoctor
from support.loop_programs import COMMITTED, assert_tensors_are_noted, calls, materials, played, program
from support.sampling import spread, thinned
from test_loop_of_each_layout import LOOPS

from kvdoctor.addons.loops.contract_file import CONTRACT_FILE, VECTORS_FILE
from kvdoctor.addons.loops.languages import LANGUAGES
from kvdoctor.addons.loops.pipeline import LoopRequest, write_loop
from kvdoctor.options import Options

PROGRAMS = list(LANGUAGES)
COMPILED = [name for name in PROGRAMS if name != "python"]
LAYOUTS = (
    "layout-delta-appended-healthy",
    "layout-delta-healthy",
    "layout-scatter-static-pair-healthy",
    "layout-ort-t5-init-healthy",
    "layout-rwkv-healthy",
    "layout-aihub-whisper-healthy",
    "layout-embedding-two-names-healthy",
    "layout-three-position-rows-healthy",
    "layout-decoder-masked-mha-healthy",
    "decoder-only-half-cache-healthy",
)
"""Layouts whose loops differ: appended and written rows, buffers, an encoder in the first call, states, embeddings."""


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def assert_plays(language: str, name: str, scratch: Path) -> None:
    done = played(language, name, scratch)
    runs = json.loads((materials(name, scratch).folder / VECTORS_FILE).read_text("utf-8"))["runs"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{run['name']}: as expected" for run in runs]
    lines = (materials(name, scratch).folder / f"{language}.jsonl").read_text("utf-8").splitlines()
    ended = [entry for entry in map(json.loads, lines) if "tokens" in entry]
    assert [entry["run"] for entry in ended] == [run["name"] for run in runs]
    for entry, run in zip(ended, runs, strict=True):
        assert entry["error"] is None
        for tokens, due in zip(entry["tokens"], (c["expect"] for c in run["calls"] if "expect" in c), strict=True):
            assert all(wanted in (-1, token) for token, wanted in zip(tokens, due, strict=True))


@pytest.mark.parametrize("name", thinned([*COMMITTED, *LOOPS], 12, 6))
def test_the_program_in_python_decodes_every_layout(name: str, scratch: Path) -> None:
    assert_plays("python", name, scratch)


@pytest.mark.slow
@pytest.mark.parametrize(("language", "name"), spread(COMPILED, [*COMMITTED, *LAYOUTS], 4))
def test_a_compiled_program_decodes(language: str, name: str, scratch: Path) -> None:
    assert_plays(language, name, scratch)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("language", COMPILED)
def test_a_compiled_program_decodes_every_layout(language: str, name: str, scratch: Path) -> None:
    if name == "layout-ort-whisper-shared-healthy" and language in ("java", "javascript", "typescript"):
        pytest.skip("up to 1.30, onnxruntime does not copy the past into a present that is another buffer")
    assert_plays(language, name, scratch)


languages_of_all = pytest.mark.parametrize(
    "language", [pytest.param(name, marks=() if name == "python" else pytest.mark.slow) for name in PROGRAMS]
)


@languages_of_all
def test_greedy_tokens_end_where_the_contract_says(language: str, scratch: Path, tmp_path: Path) -> None:
    made, built = materials("llama-gqa", scratch), program(language, scratch)

    def decoded(*rows: list[int], ids: dict[str, Any] | None = None, **how: Any) -> list[str]:
        contract = made.edited(tmp_path, generation=made.contract["generation"] | {"end": []} | (ids or {}))
        done = built.run("--model", made.model, "--contract", contract, *calls(*rows, most=6, **how))
        assert done.returncode == 0, done.stderr
        return [line.strip() for line in done.stdout.splitlines()]

    prompt = [5, 6, 7]
    (line,) = decoded(prompt)
    tokens = line.split(",")
    assert len(tokens) == 6
    before = ",".join(tokens[: tokens.index(tokens[3])])
    first = [int(tokens[0])]
    assert decoded(prompt, stop=[int(tokens[3])]) == [before]
    assert decoded(prompt, ids={"end": [int(tokens[3])]}) == [before]
    assert decoded(prompt, [6, 7])[0] == line
    assert tokens[0] not in decoded(prompt, ids={"suppress": first})[0].split(",")
    assert decoded(prompt, ids={"begin_suppress": first})[0].split(",")[0] != tokens[0]
    assert decoded(prompt, ids={"forced": [[3, 9], [4, 8]]})[0].startswith("9,8,")
    drawn = [decoded(prompt, temperature=2, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    one_left = ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1})
    assert [decoded(prompt, temperature=2, **how) for how in one_left] == [[line]] * 3
    assert decoded(prompt, repetition_penalty=1e-6) != [line]


def _of_another_model(contract: dict[str, Any]) -> dict[str, Any]:
    (file,) = contract["files"]
    inputs = file["inputs"] | {"past_key_values.9.key": {"dtype": "float", "shape": [-1, 2, -1, 8]}}
    return {"files": [file | {"inputs": inputs}]}


def _of_another_size(contract: dict[str, Any]) -> dict[str, Any]:
    (file,) = contract["files"]
    inputs = {
        n: one | {"shape": [3 if size == 2 else size for size in one["shape"]]} for n, one in file["inputs"].items()
    }
    return {"files": [file | {"inputs": inputs}]}


def _of_another_type(contract: dict[str, Any]) -> dict[str, Any]:
    (file,) = contract["files"]
    return {"files": [file | {"inputs": file["inputs"] | {"input_ids": {"dtype": "int32", "shape": [-1, -1]}}}]}


def _without_an_input(contract: dict[str, Any]) -> dict[str, Any]:
    """As of a model before it took one more, an image for example."""
    (file,) = contract["files"]
    return {"files": [file | {"inputs": {n: one for n, one in file["inputs"].items() if n != "attention_mask"}}]}


@languages_of_all
def test_a_program_refuses_what_it_cannot_do(language: str, scratch: Path, tmp_path: Path) -> None:
    made, built = materials("llama-gqa", scratch), program(language, scratch)
    contract = made.contract

    def refused(said: str, *words: object, **changes: Any) -> None:
        done = built.run("--model", made.model, "--contract", made.edited(tmp_path, **changes), *words)
        assert done.returncode != 0, said
        assert said in done.stderr
        assert "Traceback" not in done.stderr

    prompt = calls([5, 6, 7])
    refused("kvdoctor/loop/9", *prompt, schema="kvdoctor/loop/9")
    refused("past_key_values.9.key", *prompt, **_of_another_model(contract))
    refused("another model", *prompt, **_of_another_size(contract))
    refused("input_ids", *prompt, **_of_another_type(contract))
    refused("attention_mask", *prompt, **_without_an_input(contract))
    refused("id", *calls([5, 128]))
    refused("id", *calls([5, -1]))
    refused("stands for an image", *calls([5, 127]), placeholders=[127])
    refused("at most", *calls([5] * 100))
    refused("length", *calls([5, 6, 7], [5]), pads=False)


@languages_of_all
def test_options_that_cannot_be_right_are_refused(language: str, scratch: Path) -> None:
    made, built = materials("llama-gqa", scratch), program(language, scratch)
    for said, *given in (
        ("", *calls([5, 6], top_k=-1, temperature=1)),
        ("", *calls([5, 6], most=-1)),
        ("", *calls([5, 6], temperature=-1)),
        ("mots", *calls([5, 6], mots=3)),
        ("rows" if language == "python" else "", "--calls", '[{"call": "generate"}]'),
        ("", "--calls", '{"call": "generate", "rows": [[5, 6]]}'),
        ("", *calls(["x"])),  # type: ignore[list-item]
        ("", "--calls", "no JSON"),
        ("nonsense", "--calls", '[{"call": "nonsense"}]'),
        ("", *calls([5, 6]), "--provider", "NoSuchExecutionProvider"),
        ("", *calls([5, 6]), "--no-such-option", "5"),
        ("", "--record", made.folder / "bad.jsonl", "--runs", made.folder / CONTRACT_FILE),
    ):
        done = built.run("--model", made.model, "--contract", made.folder / CONTRACT_FILE, *given)
        assert done.returncode in (1, 2), given
        assert done.stderr, given
        assert said in done.stderr, given


@languages_of_all
def test_sources_of_unequal_length_are_masked(language: str, scratch: Path) -> None:
    """A batch decodes the tokens that each source has by itself."""
    made, built = materials("marian-4.57.6", scratch), program(language, scratch)

    def decoded(*sources: list[int]) -> str:
        given = calls(*([1] for _ in sources), source=list(sources), most=6, stop=[])
        done = built.run("--model", made.model, "--contract", made.folder / CONTRACT_FILE, *given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    alone = [decoded(one) for one in ([5, 6, 7, 8, 9], [9, 8])]
    assert decoded([5, 6, 7, 8, 9], [9, 8]) == "".join(alone)
    assert alone[0] != alone[1]


@languages_of_all
def test_a_ring_that_is_full_goes_on(language: str, scratch: Path) -> None:
    """It has room for 16 tokens; every language finds the tokens of Python after them."""
    made, prompt = materials("layout-ring-healthy", scratch), [5, 6, 7]
    given = ("--model", made.model, "--contract", made.folder / CONTRACT_FILE, *calls(prompt, most=40, stop=[]))
    lines = {program(name, scratch).run(*given).stdout.strip() for name in ("python", language)}
    (tokens,) = (line.split(",") for line in lines)
    assert len(tokens) == 40


@pytest.mark.parametrize(
    ("language", "name"),
    [
        pytest.param(language, name, marks=() if language == "python" and name == "llama-gqa" else pytest.mark.slow)
        for language in PROGRAMS
        for name in ("llama-gqa", "marian-4.57.6", "whisper", "layout-embedding-image-healthy")
    ],
)
def test_a_record_is_accepted(language: str, name: str, scratch: Path) -> None:
    made = materials(name, scratch)
    assert_plays(language, name, scratch)
    record = made.folder / f"{language}.jsonl"
    done = kvdoctor("step-test", made.model, "--consumer", "held", "--trace", record, "--format", "json")
    report = json.loads(done.stdout)
    about = [one["code"] for one in (*report["findings"], *report["not_checked"])]
    assert not {"KV208", "KV420"} & set(about), done.stdout
    runs = json.loads((made.folder / VECTORS_FILE).read_text("utf-8"))["runs"]
    assert f"all {len(runs)} runs" in done.stdout
    assert_tensors_are_noted([json.loads(line) for line in record.read_text("utf-8").splitlines()])


@languages_of_all
def test_the_command_of_the_readme_decodes(language: str, scratch: Path) -> None:
    built = program(language, scratch)
    text = (built.folder / "README.md").read_text("utf-8")
    line = next(line for line in text.splitlines() if "--model" in line and "--calls" in line)
    done = built.run("--model", EXPORTS / "llama-gqa", *shlex.split(line.partition("MODEL")[2]))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().split(",")) > 1


def test_a_contract_with_a_wrong_rule_decodes_other_tokens(scratch: Path, tmp_path: Path) -> None:
    made, built = materials("llama-gqa", scratch), program("python", scratch)
    (decode,) = made.contract["calls"]["decode"]
    still = [one | {"inside": {}, "step": 0} if one["name"] == "position_ids" else one for one in decode["made"]]
    crossed = [take | {"output": take["output"].replace("key", "value")} for take in decode["takes"]]
    for change in ({"made": still}, {"takes": crossed}):
        changes = {"calls": made.contract["calls"] | {"decode": [decode | change]}}
        given = ("--contract", made.edited(tmp_path, **changes), "--runs", made.folder / VECTORS_FILE)
        done = built.run("--model", made.model, *given, "--record", tmp_path / "result.jsonl")
        assert done.returncode == 1
        assert " in place of " in done.stdout


@languages_of_all
def test_a_name_is_that_of_the_program(language: str, scratch: Path) -> None:
    """However the language spells it, no file and no path has the default name."""
    folder = scratch / f"{language}-named"
    made = write_loop(LoopRequest(str(EXPORTS / "llama-gqa"), str(folder), language, name="tiny_llama"), Options())
    assert made.reason is None
    for path in (path for path in folder.rglob("*") if path.is_file()):
        text = (str(path.relative_to(folder)) + path.read_text("utf-8")).lower().replace("-", "_")
        assert "decode_loop" not in text.replace("decodeloop", "decode_loop"), path
    shutil.rmtree(folder)


def test_the_page_has_the_lines_of_each_program() -> None:
    assert make_loops.PAGE.read_text("utf-8") == make_loops.page(), "python docs/make_loops.py"
