"""What `--target` takes, the measured table, and what a graph asks for, without any other runtime."""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path

import onnx
import pytest
from support.command_line import Done, run
from support.isolated import kvdoctor
from support.text_fixtures import compile_text, load_all

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.errors import UsageError
from kvdoctor.model.view import GraphView
from kvdoctor.runtime import release_environments
from kvdoctor.runtime.environments import EnvironmentUnavailable
from kvdoctor.runtime.release_environments import find_python, prepare_environment, this_version
from kvdoctor.runtime.targets import BINDINGS, order, parse_targets
from kvdoctor.runtime.targets import limits as limits_table
from kvdoctor.runtime.targets.limits import find_oldest, limits_of, newest_limits, read_demands, releases

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("spec", "runtime"),
    [
        ("onnxruntime==1.16.3", "1.16.3"),
        ("onnxruntime-gpu==1.18.0", "1.18.0"),
        ("ort-crate==1.16.3", "1.16.3"),
        ("ort-crate==2.0.0-rc.10", "1.22.0"),
        ("onnxruntime-node==1.21.0", "1.21.0"),
        ("microsoft.ml.onnxruntime==1.20.1", "1.20.1"),
        ("com.microsoft.onnxruntime:onnxruntime-android==1.17.3", "1.17.3"),
        ("@huggingface/transformers==3.8.1", "1.21.0"),
        ("onnxruntime-php==0.2.7", "1.22.0"),
        ("onnxruntime==9.0.0", "9.0.0"),
    ],
)
def test_a_spec_means_a_runtime(spec: str, runtime: str) -> None:
    (target,) = parse_targets([spec])
    assert target.onnxruntime == runtime
    assert target.runtime == f"onnxruntime=={runtime}"


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("onnxruntime", "NAME==RELEASE"),
        ("onnxruntime==", "NAME==RELEASE"),
        ("==1.16.3", "it takes"),
        ("onnxruntme==1.16.3", "did you mean onnxruntime?"),
        ("ort-create==2.0.0-rc.10", "did you mean ort-crate?"),
        ("llamacpp==10.0.0", "it takes onnxruntime"),
        ("onnxruntime==1.16", "onnxruntime==1.16.3"),
        ("onnxruntime==latest", "a whole release"),
        ("onnxruntime==1.2.3", "the oldest is"),
        ("onnxruntime==1.16.3; rm -rf", "a whole release"),
        ("ort-crate==2.0.0-rc.99", "ort-crate==2.0.0-rc.9"),
        ("onnxruntime==\uff11.16.3", "a whole release"),
    ],
)
def test_what_is_no_target_is_refused_with_the_nearest(spec: str, nearest: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_targets([spec])
    assert nearest in str(refusal.value)


def test_one_named_twice_counts_once() -> None:
    assert len(parse_targets(["onnxruntime==1.16.3", "ort==1.16.3", "onnxruntime==1.18.1"])) == 2


def test_the_hazards_of_the_crate_end_with_the_release_that_mended_them() -> None:
    kinds = {
        release: {hazard.kind for hazard in parse_targets([f"ort-crate=={release}"])[0].hazards}
        for release in ("1.16.3", "2.0.0-rc.10", "2.0.0-rc.11", "2.0.0-rc.12", "2.0.0-rc.13")
    }
    assert kinds["1.16.3"] == kinds["2.0.0-rc.10"] == {"reads-empty", "makes-empty"}
    assert kinds["2.0.0-rc.11"] == kinds["2.0.0-rc.12"] == {"makes-empty"}
    assert kinds["2.0.0-rc.13"] == set()


def test_bindings_ship_releases_that_were_measured_or_are_of_a_line_that_was() -> None:
    for binding in BINDINGS:
        for runtime in binding.ships.values():
            assert limits_of(runtime) is not None, (binding.name, runtime)


def test_the_table_is_in_order_and_its_limits_grow() -> None:
    assert list(releases()) == sorted(releases(), key=order)
    rows = [limits_of(release) for release in releases()]
    for earlier, later in pairwise(rows):
        assert earlier is not None
        assert later is not None
        assert (earlier.ir, earlier.opset) <= (later.ir, later.opset)
    assert newest_limits().unsupported == frozenset()


def test_known_limits_are_those_that_were_seen_by_others() -> None:
    """docs/Versioning.md of ONNX Runtime, and the limits that people met."""
    known = {"1.16.3": (9, 19), "1.17.3": (9, 20), "1.18.1": (10, 21), "1.21.1": (10, 22), "1.23.2": (11, 23)}
    for release, limits in known.items():
        row = limits_of(release)
        assert row is not None
        assert (row.ir, row.opset) == limits


def test_a_patch_that_was_not_measured_is_said_to_lack_what_its_whole_line_lacks() -> None:
    between, first, last = limits_of("1.16.1"), limits_of("1.16.0"), limits_of("1.16.3")
    assert between is not None
    assert first is not None
    assert last is not None
    assert "com.microsoft:MatMulNBits" in first.unsupported
    assert between.unsupported == first.unsupported & last.unsupported
    assert limits_of("9.0.0") is None


@pytest.mark.parametrize(
    ("target", "warned"), [("1.23.2", True), ("1.24.0", False), ("1.24.1", False), ("9.0.0", False)]
)
def test_a_meaning_that_changed_is_told_without_a_run(target: str, warned: bool, tmp_path: Path) -> None:
    """Between the measured releases it is not known; a graph without the attribute is not concerned."""
    model = load_all()["layout-gqa-window-healthy"].write(tmp_path / "window")
    other = load_all()["layout-gqa-growing-healthy"].write(tmp_path / "other")
    for folder, expected in ((model, warned), (other, False)):
        done = kvdoctor("inspect", folder, "--target", f"onnxruntime=={target}", "--format", "json")
        found = json.loads(done.stdout)["findings"]
        assert [one["name"] for one in found] == ["meaning-changed"] * expected
        assert all("counts the new token" in one["evidence"][0] for one in found)


def test_the_page_shows_the_table() -> None:
    import make_limits

    table = json.loads(make_limits.FILE.read_text(encoding="utf-8"))
    assert set(table["releases"]) == set(releases())
    assert make_limits.PAGE.read_text(encoding="utf-8") == make_limits.page(table)


def test_what_a_graph_asks_for_counts_bodies_and_functions() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 21, "own": 1, "com.microsoft": 1]>
    decoder (float[b, 8] x, bool flag) => (float[b, 8] y) {
        y = If (flag) <
          then_branch = one () => (float[b, 8] a) { a = com.microsoft.Gelu (x) },
          else_branch = other () => (float[b, 8] c) { c = own.twice (x) }
        >
    }
    <opset_import: ["": 23], domain: "own">
    twice (x) => (y) { y = Add (x, x) }
    """
    asked = read_demands(GraphView(compile_text(text)))
    assert (asked.ir, asked.opset) == (10, 23)
    assert "com.microsoft:Gelu" in asked.features
    assert "Add-14" in asked.features


def test_features_in_words() -> None:
    assert limits_table.describe_feature("Attention-23") == "Attention of opset 23"
    assert limits_table.describe_feature("com.microsoft:GroupQueryAttention.softcap") == (
        "attribute softcap of com.microsoft GroupQueryAttention"
    )
    assert limits_table.describe_feature("com.microsoft:GroupQueryAttention.inputs-12") == (
        "com.microsoft GroupQueryAttention with 12 inputs"
    )
    assert limits_table.tested_operators().standard("Attention", 22) is None


def test_no_healthy_fixture_asks_too_much_of_the_newest_release() -> None:
    for fixture in load_all().values():
        for name, text in fixture.files.items() if fixture.healthy else ():
            if name.endswith(".onnx"):
                asked = read_demands(GraphView(compile_text(text)))
                assert asked.ir <= newest_limits().ir
                assert asked.opset <= newest_limits().opset
                assert not asked.lacking(newest_limits())


def test_without_a_fitting_python_the_command_is_named_that_brings_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(release_environments, "python_versions", lambda _release: ("3.2", "3.1"))
    with pytest.raises(EnvironmentUnavailable, match=r"wheels for Python 3\.1, 3\.2.*uv python install 3\.2"):
        prepare_environment("1.16.3", offline=False)
    assert not list(tmp_path.rglob("*python*"))


def test_this_python_is_taken_where_it_fits() -> None:
    assert find_python((this_version(), "3.2"), "no-uv") == (this_version(), sys.executable)
    assert find_python(("3.2",), "no-uv") is None


def test_without_uv_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(release_environments, "find_uv", lambda: None)
    for offline, end in ((True, "pip install uv; then remove --offline once: .*"), (False, "pip install uv")):
        with pytest.raises(EnvironmentUnavailable, match=rf"1\.16\.3 is not in the cache.* {end}$"):
            prepare_environment("1.16.3", offline=offline)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """The command line with empty caches."""
    for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)

    return partial(run, cwd=ROOT)


def test_offline_with_nothing_cached_is_not_checked_and_never_healthy(alone: Callable[..., Done]) -> None:
    spec = "onnxruntime==1.16.3"
    done = alone("step-test", "fixtures/exports/gpt2", "--target", spec, "--offline", "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 3
    assert report["verdict"] == "incomplete"
    (entry,) = (entry for entry in report["not_checked"] if entry["code"] == "KV404")
    assert entry["essential"]
    assert "onnxruntime 1.16.3 is not in the cache; without --offline it may be downloaded" in entry["reason"]
    (target,) = report["targets"]
    assert (target["asked"], target["ir"], target["opset"]) == (spec, 9, 19)
    assert "decoder" in target["not_run"]


def test_a_wrong_target_is_wrong_usage(alone: Callable[..., Done]) -> None:
    for command in ("inspect", "step-test", "gate"):
        done = alone(command, "fixtures/exports/gpt2", "--target", "onnxruntime=1.16.3")
        assert done.returncode == 2
        assert "NAME==RELEASE" in done.stderr


def test_the_installed_runtime_as_target_needs_no_environment(alone: Callable[..., Done]) -> None:
    from importlib import metadata

    spec = f"onnxruntime=={metadata.version('onnxruntime')}"
    done = alone("step-test", "fixtures/exports/gpt2", "--target", spec, "--offline", "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["verdict"] == "healthy"
    assert {run["target"] for run in report["runs"]} == {spec}
    assert [target["asked"] for target in report["targets"]] == [spec]


def test_an_inspection_reads_the_table_alone(alone: Callable[..., Done]) -> None:
    done = alone("inspect", "fixtures/exports/gpt2", "--target", "onnxruntime==1.15.1", "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert not [finding for finding in report["findings"] if finding["code"].startswith("KV40")]
    assert report["targets"][0]["opset"] == 18
    done = alone("inspect", "fixtures/exports/gpt2", "--target", "onnxruntime==9.0.0")
    assert "onnxruntime==9.0.0 is newer than the measured releases" in done.stdout


def test_the_oldest_release_is_that_of_the_table(tmp_path: Path) -> None:
    """It and all newer ones take the file, and the one before it does not."""
    for name, model in load_all().items():
        if name.startswith("layout-"):
            folder = open_folder(str(model.write(tmp_path / name)))
            for view in (file.view for file in folder.files if file.view is not None):
                oldest = find_oldest(view)
                takes = newest_that_open(view)
                assert (oldest.release if oldest else None) == (takes[-1] if takes else None), name
                assert oldest is None or bool(oldest.because) == (len(takes) < len(releases()))


def newest_that_open(view: GraphView) -> list[str]:
    return [*takewhile(lambda one: not is_excessive(view, one), reversed(releases()))]


def is_excessive(view: GraphView, release: str) -> bool:
    limits, asked = limits_of(release), read_demands(view)
    assert limits is not None
    return asked.ir > limits.ir or asked.opset > limits.opset or bool(asked.lacking(limits))


@pytest.mark.parametrize(
    ("ir", "opset", "says"),
    [(8, 15, ""), (10, 15, "needs onnxruntime 1.18.1 (IR version 10)"), (8, 20, "needs onnxruntime 1.17.0 (opset 20)")],
)
def test_inspect_says_what_the_file_needs(ir: int, opset: int, says: str, tmp_path: Path) -> None:
    folder = load_all()["decoder-only-healthy"].write(tmp_path / "model")
    model = onnx.load(str(folder / "model.onnx"))
    model.ir_version = ir
    next(entry for entry in model.opset_import if not entry.domain).version = opset
    onnx.save(model, str(folder / "model.onnx"))
    text = kvdoctor("inspect", folder).stdout
    assert says in text
    assert ("needs onnxruntime" in text) == bool(says)
