"""Golden numbers: `record` keeps what a healthy model returns, `--against` and the gate compare with it."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.isolated import EXPORTS, kvdoctor
from support.sampling import sampled
from support.text_fixtures import Fixture, load_all

from kvdoctor import api
from kvdoctor.addons.comparison import api as comparison
from kvdoctor.decode.golden import GoldenWalk, checksum_draws, correlate, find_difference, pack, unpack
from kvdoctor.decode.paired_walks import Walk

CHECK = "golden-differs"
Arrays = dict[str, "np.ndarray[Any, Any]"]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden numbers of GPT-2."""
    return record("gpt2", tmp_path_factory.mktemp("golden") / "gpt2.npz")


def record(name: str, out: Path, *options: str) -> Path:
    done = kvdoctor("record", EXPORTS / name, "-o", out, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{out}: golden numbers of " in done.stdout
    return out


def compare(model: Path, golden: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of a step-test against golden numbers."""
    done = kvdoctor("step-test", model, "--against", golden, "--format", "json", *options)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def found(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in report["findings"] if one["name"] == CHECK]


def changed(tmp_path: Path, change: Callable[[str, "np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"]) -> Path:
    """A copy of GPT-2 whose weights went through a function of their name and values."""
    folder = tmp_path / "changed"
    shutil.copytree(EXPORTS / "gpt2", folder)
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = change(tensor.name, numpy_helper.to_array(tensor)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, folder / "model.onnx")
    return folder


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_same_model_gives_the_same_bytes_and_nothing_of_the_machine(golden: Path, tmp_path: Path) -> None:
    again = record("gpt2", tmp_path / "again.npz")
    assert again.read_bytes() == golden.read_bytes()
    assert str(EXPORTS) not in bytes(unpack(golden)["golden"]).decode()
    assert golden.stat().st_size < 20_000


def test_a_file_that_exists_is_replaced_where_that_is_asked_for(golden: Path, tmp_path: Path) -> None:
    file = tmp_path / "golden.npz"
    file.write_bytes(b"mine")
    refused = kvdoctor("record", EXPORTS / "gpt2", "-o", file)
    assert (refused.returncode, file.read_bytes()) == (2, b"mine")
    assert "--force replaces it" in refused.stderr
    record("gpt2", file, "--force")
    assert file.read_bytes() == golden.read_bytes()


def test_nothing_is_recorded_of_a_model_that_is_not_healthy(tmp_path: Path) -> None:
    out = tmp_path / "golden.npz"
    done = kvdoctor("record", EXPORTS / "marian-4.46.3", "-o", out)
    assert (done.returncode, out.exists()) == (1, False)
    assert "no golden numbers were written" in done.stdout
    assert "cross-cache-emptied" in done.stdout


def with_head(change: dict[str, Any]) -> Callable[[Arrays], Arrays]:
    def changed(arrays: Arrays) -> Arrays:
        head = json.loads(arrays["golden"].tobytes()) | change
        return {**arrays, "golden": np.frombuffer(json.dumps(head).encode(), np.uint8)}

    return changed


def of(name: str, change: Callable[["np.ndarray[Any, Any]"], Any]) -> Callable[[Arrays], Arrays]:
    """Another value of one array of the first decoding; None leaves it out."""

    def changed(arrays: Arrays) -> Arrays:
        made = {**arrays, name: change(arrays[name])}
        return {key: values for key, values in made.items() if values is not None}

    return changed


def text(content: bytes) -> Callable[["np.ndarray[Any, Any]"], Any]:
    return lambda _: np.frombuffer(content, np.uint8)


NONE = "holds no golden numbers"
BAD: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "another version": (with_head({"schema": "kvdoctor/golden/99"}), NONE),
    "no stacks": (with_head({"stacks": {}}), NONE),
    "a stack that is a number": (with_head({"stacks": [1]}), NONE),
    "no facts": (of("golden", lambda _: None), NONE),
    "facts that are no JSON": (of("golden", text(b"{")), NONE),
    "facts nested too deeply": (of("golden", text(b"[" * 100_000)), NONE),
    "no logits": (of("0/0:logits", lambda _: None), NONE),
    "logits of another shape": (of("0/0:logits", lambda values: values[:1]), NONE),
    "tokens that are no integers": (of("0/0:tokens", lambda values: values + 0.5), NONE),
    "tokens below zero": (of("0/0:tokens", lambda values: values - 1000), NONE),
    "tokens beyond the vocabulary": (of("0/0:tokens", lambda values: values + 1000), NONE),
    "deviations that are no numbers": (of("0/0:deviations", lambda values: values * np.nan), NONE),
    "sizes below one": (of("0/0:sizes", lambda values: values - 9), NONE),
    "sizes beyond reason": (of("0/0:sizes", lambda values: values * 100_000), NONE),
    "names that are a number": (of("0/0:names", text(b"7")), NONE),
    "logits that are NaN": (of("0/0:logits", lambda values: np.where(values == values.max(), np.nan, values)), "NaN"),
    "a cache that is NaN": (of("0/0:caches", lambda values: values * np.float32(np.nan)), "NaN"),
    "likely tokens below zero": (of("0/0:top", lambda values: values - 1000), "the likeliest tokens are no ids"),
    "likely tokens beyond": (of("0/0:top", lambda values: values + 1000), "beyond its vocabulary of 128"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_file_is_refused(kind: str, golden: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.npz"
    change, said = BAD[kind]
    file.write_bytes(pack(change(unpack(golden))))
    refuses(file, said)


def test_what_is_no_golden_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.npz"
    for content in (b"", b"PK\x03\x04 cut", b"text", pickled(), bomb()):
        file.write_bytes(content)
        refuses(file)
    refuses(tmp_path / "missing.npz", "is no file")


def test_hidden_tokens_of_a_vocabulary_are_no_fault_of_a_file(golden: Path, tmp_path: Path) -> None:
    file = tmp_path / "hidden.npz"
    hide = of("0/0:logits", lambda values: np.where(np.arange(values.shape[1]) == 0, -np.inf, values).astype("f4"))
    file.write_bytes(pack(hide(unpack(golden))))
    code, report = compare(EXPORTS / "gpt2", file)
    assert (code, len(found(report))) == (1, 1)


def pickled() -> bytes:
    content = io.BytesIO()
    np.savez(content, golden=np.array([{"a": 1}], dtype=object))
    return content.getvalue()


def bomb() -> bytes:
    """A small file that says that it holds more than any golden file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("golden.npy", bytes(80 << 20))
    return content.getvalue()


def refuses(file: Path, words: str = "holds no golden numbers") -> None:
    done = kvdoctor("step-test", EXPORTS / "gpt2", "--against", file)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_the_recorded_model_agrees(golden: Path) -> None:
    code, report = compare(EXPORTS / "gpt2", golden)
    assert (code, report["verdict"], found(report)) == (0, "healthy", [])
    assert any("34 calls of 3 decodings against" in note for note in report["notes"])


@pytest.mark.parametrize("options", sampled(["--cache static=64", "--logits last"], 2))
def test_another_form_of_the_model_agrees(options: str, golden: Path, tmp_path: Path) -> None:
    made = kvdoctor("convert", EXPORTS / "gpt2", "-o", tmp_path / "made", *options.split())
    assert made.returncode == 0, made.stdout + made.stderr
    code, report = compare(tmp_path / "made", golden)
    assert (code, found(report)) == (0, [])
    assert any("34 calls" in note for note in report["notes"])


@pytest.mark.slow
def test_a_merged_decoder_agrees_with_its_repair_and_its_pair(tmp_path: Path) -> None:
    golden = record("marian-4.57.6", tmp_path / "golden.npz", "--consumer", "held")
    made = kvdoctor("re-export", EXPORTS / "marian-4.57.6", "-o", tmp_path / "made")
    assert made.returncode == 0, made.stdout + made.stderr
    code, report = compare(tmp_path / "made", golden)
    assert (code, found(report)) == (0, [])
    assert sum("3 decodings against" in note for note in report["notes"]) == 2


def times(factor: float) -> Callable[[str, "np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"]:
    """One weight of the second layer multiplied."""
    return lambda name, values: values * factor if name == "transformer.h.1.attn.c_proj.weight" else values


def late(name: str, values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Other positions from the tenth on, and a little noise from the first token on."""
    if name == "transformer.wpe.weight":
        values = values.copy()
        values[10:] += np.random.default_rng(0).standard_normal(values[10:].shape)
    return times(1.0002)(name, values)


def test_changed_weights_are_found_with_the_call_and_the_tokens(golden: Path, tmp_path: Path) -> None:
    code, report = compare(changed(tmp_path, times(1.5)), golden)
    (finding,) = found(report)
    assert (code, finding["severity"], finding["confidence"]) == (1, "error", "confirmed")
    assert finding["where"] == "batch 1, prompt of 8 tokens"
    assert "the likeliest token is" in finding["observed"]
    assert "standard deviations, and 0.0002 are allowed" in finding["observed"]
    assert "within 0.0002 standard deviations (float32: right splits differ by" in finding["declared"]


@pytest.mark.parametrize(("change", "expected"), [(times(1.0002), (0, "warning")), (late, (1, "error"))])
def test_what_rounding_hardly_explains_is_a_warning_and_hides_no_large_difference_later(
    change: Any, expected: tuple[int, str], golden: Path, tmp_path: Path
) -> None:
    code, report = compare(changed(tmp_path, change), golden)
    assert [(code, one["severity"]) for one in found(report)] == [expected]


def test_a_cache_of_one_walk_hides_no_logits_of_another() -> None:
    rng, walk = np.random.default_rng(0), Walk(1, 1, ())
    logits, cache, top = rng.standard_normal((1, 64)), rng.standard_normal(64), np.zeros((1, 5), int)
    wide = np.ones(1)

    def walked(logits_off: float, cache_off: float) -> GoldenWalk:
        return GoldenWalk(
            walk, top[:, :1], logits + logits_off, wide, top, {"0.key": cache + cache_off}, {"0.key": 1.0}
        )

    pairs = [(walked(0, 1), walked(0, 0)), (walked(2e-3, 0), walked(0, 0)), (walked(1, 0), walked(0, 0))]
    for count, cache_name, off in ((1, "0.key", 1), (2, None, 2e-3), (3, None, 1)):
        difference = find_difference(pairs[:count], (1e-3, 1e-2))
        assert difference is not None
        assert (difference.cache, difference.relative) == (cache_name, pytest.approx(off, rel=0.01))


def test_another_form_of_the_cache_with_the_same_logits_is_a_warning(golden: Path, tmp_path: Path) -> None:
    def keys_doubled(name: str, values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Keys twice as large and queries half as large have the same products."""
        if ".0.attn.c_attn." not in name:
            return values
        width = values.shape[-1] // 3
        return values * np.repeat([0.5, 2.0, 1.0], width)

    code, report = compare(changed(tmp_path, keys_doubled), golden)
    (finding,) = found(report)
    assert (code, finding["severity"], finding["subject"]) == (0, "warning", ["cache 0.key"])
    assert "all logits agree" in finding["cause"]


@pytest.mark.parametrize(("bits", "severities"), [(8, []), (1, ["error"])])
def test_weights_that_are_rounded_otherwise_are_judged_by_correlation(
    bits: int, severities: list[str], golden: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "rounded"
    shutil.copytree(EXPORTS / "gpt2", folder)
    model = onnx.load(folder / "model.onnx")
    rounded = [one for one in model.graph.initializer if one.name.endswith((".weight", "wte")) and len(one.dims) == 2]
    for tensor in rounded:
        values = numpy_helper.to_array(tensor)
        unit = np.float32(np.abs(values).max() / (2 ** (bits - 1) - 0.5))
        whole = np.round(values / unit).astype(np.int8)
        model.graph.initializer.extend(
            [
                numpy_helper.from_array(whole, f"{tensor.name}.int8"),
                numpy_helper.from_array(np.array(unit), f"{tensor.name}.unit"),
            ]
        )
        names = [f"{tensor.name}.int8", f"{tensor.name}.unit"]
        model.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", names, [tensor.name]))
        model.graph.initializer.remove(tensor)
    onnx.save(model, folder / "model.onnx")
    _, report = compare(folder, golden)
    assert [one["severity"] for one in found(report)] == severities
    told = [*report["notes"], *(one["observed"] for one in found(report))]
    assert any("the correlation of the logits is" in text for text in told)


def test_golden_numbers_of_another_model_compare_nothing(golden: Path) -> None:
    code, report = compare(EXPORTS / "t5", golden, "--consumer", "held")
    assert (code, report["verdict"]) == (3, "incomplete")
    reasons = [one["reason"] for one in report["not_checked"] if one["code"] == "KV321"]
    assert len(reasons) == len(report["stacks"])
    assert all("it is of another model" in reason for reason in reasons)
    done = kvdoctor("step-test", EXPORTS / "t5", "--against", golden, "--consumer", "held")
    (advice,) = (line.strip() for line in done.stdout.splitlines() if line.strip().startswith("decide"))
    assert "kvdoctor record" in advice, done.stdout
    assert "--reference" not in advice


def test_the_layers_of_a_stacked_cache_are_counted(golden: Path, tmp_path: Path) -> None:
    stacked = load_all()["layout-llama2-msft-stacked-healthy"].write(tmp_path)
    code, report = compare(stacked, golden)
    assert code == 3
    assert "this one has 16 tokens, 2 layers, self-attention" in report["not_checked"][0]["reason"]


def few_tokens() -> Fixture:
    """A vocabulary of fewer tokens than are kept of each call."""
    decoder = load_all()["decoder-only-healthy"]
    text = decoder.files["model.onnx"].replace("float[8, 16] w_logits", "float[8, 3] w_logits")
    text = text.replace("16] logits", "3] logits").replace("float[16, 8] w_tokens", "float[3, 8] w_tokens")
    return replace(decoder, files={"model.onnx": text})


@pytest.mark.parametrize("few", [False, True], ids=["a padded head", "few tokens"])
def test_another_vocabulary_agrees_with_what_was_recorded_of_it(few: bool, tmp_path: Path) -> None:
    model = (few_tokens() if few else load_all()["decoder-only-padded-head-healthy"]).write(tmp_path)
    done = kvdoctor("record", model, "-o", tmp_path / "golden.npz")
    assert done.returncode == 0, done.stdout + done.stderr
    code, report = compare(model, tmp_path / "golden.npz")
    assert (code, found(report)) == (0, [])


def test_a_numpy_that_draws_other_numbers_is_said(golden: Path, tmp_path: Path) -> None:
    head = json.loads(unpack(golden)["golden"].tobytes())
    head["stacks"][0]["draws"] = checksum_draws(head["seed"] + 1)
    file = tmp_path / "other.npz"
    file.write_bytes(pack(with_head(head)(unpack(golden))))
    code, report = compare(EXPORTS / "gpt2", file)
    assert code == 3
    assert "generates other random numbers" in report["not_checked"][0]["reason"]


def test_the_check_alone_without_golden_numbers_is_not_health() -> None:
    done = kvdoctor("step-test", EXPORTS / "gpt2", "--select", CHECK)
    assert done.returncode == 3, done.stdout


# --- in a gate --------------------------------------------------------------------------------------------------------


def test_a_gate_compares_by_its_policy_and_again_when_the_file_changes(golden: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "golden").mkdir(parents=True)
    shutil.copytree(EXPORTS / "gpt2", project / "exports" / "gpt2")
    shutil.copytree(EXPORTS / "llama-gqa", project / "exports" / "llama")
    shutil.copy(golden, project / "golden" / "gpt2.npz")
    (project / "kvdoctor.toml").write_text('[[overrides]]\nmodels = ["exports/gpt2"]\nagainst = "golden/gpt2.npz"\n')
    words = ("--config", project / "kvdoctor.toml", "--cache-dir", tmp_path / "cache", "--format", "json")
    gate = ("gate", project / "exports" / "gpt2", project / "exports" / "llama", *words)
    first = kvdoctor(*gate)
    assert first.returncode == 0, first.stdout + first.stderr
    with_golden = ["against" in one["arguments"] for one in json.loads(first.stdout)["reports"]]
    assert with_golden == [True, False]

    (project / "golden" / "gpt2.npz").write_bytes(pack(of("0/0:logits", lambda values: values + 1)(unpack(golden))))
    second = kvdoctor(*gate)
    assert second.returncode == 1
    names = [[finding["name"] for finding in one["findings"]] for one in json.loads(second.stdout)["reports"]]
    assert names == [[CHECK], []]


def test_a_diff_with_golden_numbers_of_another_model_says_each_thing_once(golden: Path) -> None:
    diff = comparison.diff(EXPORTS / "marian-4.46.3", golden)
    text = api.render(diff)
    assert text.count("not compared: KV321 (merged, pair): ") == text.count("not compared: ") == 1
    assert "none on either side" not in text
    assert "B has findings that golden numbers do not compare: error[KV203] cross-cache-emptied" in text
    assert f"{golden} is A" in text


@pytest.mark.slow
def test_a_diff_holds_a_model_to_golden_numbers(golden: Path, tmp_path: Path) -> None:
    for sides in ((EXPORTS / "gpt2", golden), (golden, EXPORTS / "gpt2")):
        done = kvdoctor("diff", *sides)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "equal to the golden numbers"), done.stdout
        assert "calls of" in done.stdout
    done = kvdoctor("diff", changed(tmp_path, times(1.5)), golden, "--format", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["a"]["source"]) == (1, "worse", "golden")
    assert [one["finding"]["name"] for one in document["findings"]] == [CHECK]
    done = kvdoctor("diff", EXPORTS / "t5", golden)
    assert done.returncode == 3
    assert "not compared" in done.stdout
    for words in (("--static",), ("--agree", "bits"), ("--ignore", "KV321")):
        assert kvdoctor("diff", EXPORTS / "gpt2", golden, *words).returncode == 2
    assert kvdoctor("diff", golden, golden).returncode == 2


@pytest.mark.parametrize(("hidden", "expected"), [((0,), 1.0), ((1,), 0.0)])
def test_the_correlation_leaves_out_what_both_rule_out(hidden: tuple[int, ...], expected: float) -> None:
    """Tokens at -inf say nothing of the others, but others at -inf are another model."""

    def walk_of(ruled_out: tuple[int, ...]) -> GoldenWalk:
        logits = np.arange(2.0 * 8, dtype=np.float32).reshape(2, 8)
        logits[:, list(ruled_out)] = -np.inf
        top = np.zeros((2, 5), np.int32)
        return GoldenWalk(Walk(1, 4, (1,)), np.zeros((1, 5), np.int64), logits, np.ones(2, np.float32), top, {}, {})

    assert correlate(walk_of((0,)), walk_of(hidden)) == expected
