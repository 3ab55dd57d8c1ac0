"""Golden numbers: `record` keeps what a healthy model returns, `--against` and the gate compare with it."""

import json
import shutil
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
from kvdoctor.decode.golden import GoldenWalk, correlate_samples, find_difference
from kvdoctor.decode.paired_walks import Walk
from kvdoctor.diagnose.decodings import read_golden, render_golden

CHECK = "golden-differs"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden numbers of GPT-2."""
    return record("gpt2", tmp_path_factory.mktemp("golden") / "gpt2.json")


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
    folder = shutil.copytree(EXPORTS / "gpt2", tmp_path / "changed")
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = change(tensor.name, numpy_helper.to_array(tensor)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, folder / "model.onnx")
    return folder


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_same_model_gives_the_same_bytes_and_nothing_of_the_machine(golden: Path, tmp_path: Path) -> None:
    again = record("gpt2", tmp_path / "again.json")
    assert again.read_bytes() == golden.read_bytes()
    assert str(EXPORTS) not in golden.read_text()
    assert golden.stat().st_size < 60_000


def test_a_file_that_exists_is_replaced_where_that_is_asked_for(golden: Path, tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_bytes(b"mine")
    refused = kvdoctor("record", EXPORTS / "gpt2", "-o", file)
    assert (refused.returncode, file.read_bytes()) == (2, b"mine")
    assert "--force replaces it" in refused.stderr
    record("gpt2", file, "--force")
    assert file.read_bytes() == golden.read_bytes()


def test_nothing_is_recorded_of_a_model_that_is_not_healthy(tmp_path: Path) -> None:
    out = tmp_path / "golden.json"
    done = kvdoctor("record", EXPORTS / "marian-4.46.3", "-o", out)
    assert (done.returncode, out.exists()) == (1, False)
    assert "no golden numbers were written" in done.stdout
    assert "cross-cache-emptied" in done.stdout


def edited(file: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Another file of golden numbers: `change` edits what is in it."""
    content = json.loads(file.read_bytes())
    change(content)
    out.write_text(json.dumps(content))
    return out


def head(**entries: Any) -> Callable[[dict[str, Any]], object]:
    """Other entries of the file."""
    return lambda content: content.update(entries)


def of(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], object]:
    """Another value of one entry of the first decoding; None leaves it out."""

    def edit(content: dict[str, Any]) -> None:
        walk = content["stacks"][0]["walks"][0]
        walk[name] = change(walk[name])
        if walk[name] is None:
            del walk[name]

    return edit


def each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change made to every number of a table, or of a row of it."""
    return lambda rows: [each(change)(row) if isinstance(row, list) else change(row) for row in rows]


NONE = "holds no golden numbers"
BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another version": (head(schema="kvdoctor/golden/99"), NONE),
    "no stacks": (head(stacks={}), NONE),
    "a stack that is a number": (head(stacks=[1]), NONE),
    "a seed below zero": (head(seed=-1), NONE),
    "states below zero": (lambda content: content["stacks"][0].update(states=-3), "encoder states are no count"),
    "too many states": (lambda content: content["stacks"][0].update(states=10**10), "encoder states are no count"),
    "tokens that no type holds": (of("tokens", each(lambda token: token + 10**30)), NONE),
    "no logits": (of("logits", lambda _: None), NONE),
    "logits of another shape": (of("logits", lambda rows: rows[:1]), NONE),
    "samples of another size": (of("logits", lambda rows: [row[:9] for row in rows]), NONE),
    "tokens that are no integers": (of("tokens", each(lambda token: token + 0.5)), NONE),
    "tokens below zero": (of("tokens", each(lambda token: token - 1000)), NONE),
    "tokens beyond the vocabulary": (of("tokens", each(lambda token: token + 1000)), NONE),
    "deviations that are no numbers": (of("deviations", each(lambda _: float("nan"))), NONE),
    "sizes below one": (of("walk", lambda walk: {**walk, "prompt": walk["prompt"] - 9}), NONE),
    "sizes beyond reason": (of("walk", lambda walk: {**walk, "prompt": walk["prompt"] * 100_000}), NONE),
    "caches that are a number": (of("caches", lambda _: 7), NONE),
    "a cache without its deviation": (of("spreads", lambda _: {}), NONE),
    "logits that are NaN": (of("logits", each(lambda _: float("nan"))), "NaN"),
    "a cache that is NaN": (of("caches", lambda held: dict.fromkeys(held, [float("nan")] * 64)), "NaN"),
    "likely tokens below zero": (of("top", each(lambda token: token - 1000)), "not one of its vocabulary of 128"),
    "likely tokens beyond": (of("top", each(lambda token: token + 1000)), "not one of its vocabulary of 128"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_file_is_refused(kind: str, golden: Path, tmp_path: Path) -> None:
    change, said = BAD[kind]
    refuses(bad := edited(golden, tmp_path / "bad.json", change), said)
    if kind == "tokens that no type holds":  # nor does a vocabulary of open size
        refuses(edited(bad, bad, lambda content: content["stacks"][0]["size"].update(vocabulary=None)), "an open size")


def test_what_is_no_golden_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    for content in (b"", b"PK\x03\x04 cut", b"text", b"{}", b"[" * 100_000, bytes(80 << 20)):
        file.write_bytes(content)
        refuses(file)
    refuses(tmp_path / "missing.json", "is no file")


def test_hidden_tokens_of_a_vocabulary_are_no_fault_of_a_file(golden: Path, tmp_path: Path) -> None:
    hide = of("logits", lambda rows: [[-float("inf"), *row[1:]] for row in rows])
    code, report = compare(EXPORTS / "gpt2", edited(golden, tmp_path / "hidden.json", hide))
    assert (code, len(found(report))) == (1, 1)
    kept = read_golden(str(tmp_path / "hidden.json"))
    written = render_golden(kept.model, kept.stacks, kept.seed, kept.onnxruntime)
    again = json.loads(written, parse_constant=pytest.fail)  # JSON has no infinity
    assert again["stacks"] == json.loads((tmp_path / "hidden.json").read_bytes())["stacks"]


def test_an_indented_file_is_one_all_the_same(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "indented.json").write_text(json.dumps(json.loads(golden.read_bytes()), indent=4))
    done = kvdoctor("diff", EXPORTS / "gpt2", tmp_path / "indented.json")
    assert done.returncode == 0, done.stdout + done.stderr


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
    golden = record("marian-4.57.6", tmp_path / "golden.json", "--consumer", "held")
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
    logits, cache = rng.standard_normal(64), rng.standard_normal(64)

    def walked(logits_off: float, cache_off: float) -> GoldenWalk:
        rows, held = (tuple((logits + logits_off).tolist()),), {"0.key": tuple((cache + cache_off).tolist())}
        return GoldenWalk(walk, ((0,),), rows, (1.0,), ((0,) * 5,), held, {"0.key": 1.0})

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
    folder = shutil.copytree(EXPORTS / "gpt2", tmp_path / "rounded")
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
    text = (decoder := load_all()["decoder-only-healthy"]).files["model.onnx"].replace("16] w_logits", "3] w_logits")
    text = text.replace("16] logits", "3] logits").replace("float[16, 8] w_tokens", "float[3, 8] w_tokens")
    return replace(decoder, files={"model.onnx": text})


@pytest.mark.parametrize("few", [False, True], ids=["a padded head", "few tokens"])
def test_another_vocabulary_agrees_with_what_was_recorded_of_it(few: bool, tmp_path: Path) -> None:
    model = (few_tokens() if few else load_all()["decoder-only-padded-head-healthy"]).write(tmp_path)
    done = kvdoctor("record", model, "-o", tmp_path / "golden.json")
    assert done.returncode == 0, done.stdout + done.stderr
    code, report = compare(model, tmp_path / "golden.json")
    assert (code, found(report)) == (0, [])


def test_a_numpy_that_draws_other_numbers_is_said(golden: Path, tmp_path: Path) -> None:
    other = edited(golden, tmp_path / "other.json", lambda held: held["stacks"][0].update(draws=7))
    code, report = compare(EXPORTS / "gpt2", other)
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
    shutil.copy(golden, project / "golden" / "gpt2.json")
    (project / "kvdoctor.toml").write_text('[[overrides]]\nmodels = ["exports/gpt2"]\nagainst = "golden/gpt2.json"\n')
    words = ("--config", project / "kvdoctor.toml", "--cache-dir", tmp_path / "cache", "--format", "json")
    gate = ("gate", project / "exports" / "gpt2", project / "exports" / "llama", *words)
    first = kvdoctor(*gate)
    assert first.returncode == 0, first.stdout + first.stderr
    with_golden = ["against" in one["arguments"] for one in json.loads(first.stdout)["reports"]]
    assert with_golden == [True, False]

    edited(golden, project / "golden" / "gpt2.json", of("logits", each(lambda value: value + 1)))
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
        rows = (range(8), range(8, 16))
        logits = tuple(
            tuple(-float("inf") if at in ruled_out else float(n) for at, n in enumerate(row)) for row in rows
        )
        return GoldenWalk(Walk(1, 4, (1,)), ((0,) * 5,), logits, (1.0, 1.0), ((0,) * 5,) * 2, {}, {})

    assert correlate_samples(walk_of((0,)), walk_of(hidden)) == expected
