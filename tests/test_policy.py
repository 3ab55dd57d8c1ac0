"""The policy of a project: how it is found, read and refused, what it matches, and what weighs more than what."""

import json
import re
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import run
from support.text_fixtures import load_all

from kvdoctor.cli.main import cli, find_command
from kvdoctor.decode.tolerances import TOLERANCES, bounds, find_tolerance, list_loosened
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.gating.policy import DEFAULT, SAID, Policy, find_policy, fits, models_at, read_policy
from kvdoctor.options import Options, options_of, policy_options

ROOT = Path(__file__).parent.parent
KEYS = {option.key: option for option in policy_options()}


class Done:
    """A command that was run in this process: starting another for each would take seconds."""

    def __init__(self, result: Result) -> None:
        refused = isinstance(result.exception, UsageError)
        self.returncode = 2 if refused else result.exit_code
        self.stdout, self.stderr = result.stdout, result.stderr + (str(result.exception) if refused else "")


def kvdoctor(folder: Path, *arguments: str) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return Done(CliRunner().invoke(cli, arguments))


def read(folder: Path, text: str, name: str = "kvdoctor.toml") -> Policy | None:
    (folder / name).write_text(text, encoding="utf-8")
    return read_policy(name, folder / name)


def refusal(folder: Path, text: str, name: str = "kvdoctor.toml") -> str:
    with pytest.raises(UsageError) as caught:
        read(folder, text, name)
    return str(caught.value)


# Reading


@pytest.mark.parametrize("name", KEYS)
def test_each_key_takes_its_example_and_refuses_another_kind(name: str, tmp_path: Path) -> None:
    policy = read(tmp_path, KEYS[name].policy)
    assert policy is not None
    assert set(policy.values) == {name}
    said = refusal(tmp_path, f"# a line before\n{name} = [1, 2]")
    assert said.startswith(f"kvdoctor.toml:2: {name}: it takes {KEYS[name].kind.takes}; got [1, 2]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fail_on = 'error'", "kvdoctor.toml:1: there is no key 'fail_on'; did you mean 'fail-on'?"),
        ("target = ['onnxruntime==1.16.3']", "did you mean 'targets'?"),
        ("zzz = 1", "it takes models, baseline,"),
        ("fail-on = 'fatal'", 'fail-on: it takes "note", "warning", "error" or "never"; the first three'),
        ("select = ['KV999']", "select: 'KV999' names no check; did you mean 'KV319'? `kvdoctor explain`"),
        ("ignore = ['']", "ignore: it takes a list of codes"),
        ("require = ['beams']", "got 'beams'"),
        ("targets = ['onnxruntime']", "targets: it takes NAME==RELEASE"),
        ("targets = ['onnxruntim==1.16.3']", "did you mean onnxruntime?"),
        ("seed = true", "seed: it takes a whole number, 0 or more; got True"),
        ("timeout = nan", "timeout: it takes a number of seconds above 0; got nan"),
        ("max-memory = 0", "max-memory: it takes a whole number of MiB, 1 or more; got 0"),
        ("tolerances = { float61 = 0.1 }", "it takes float, float16, bfloat16, static-quantization"),
        ("[tolerances]\nfloat16 = 2", "kvdoctor.toml:1: tolerances: float16 takes a fraction of the logits'"),
        ("models = ['../other']", "models: '../other' leaves the folder of the policy"),
        ("models = ['/etc']", "leaves the folder of the policy"),
        ("overrides = 1", "kvdoctor.toml:1: overrides takes tables, as in [[overrides]]"),
        ("[[overrides]]\nseed = 1", "kvdoctor.toml:1, override 1: it has no models"),
        ("[[overrides]]\nmodels = []", "override 1: it has no models"),
        (
            "[[overrides]]\nmodels = ['a']\n[[overrides]]\nmodels = ['b']\nsead = 1",
            "kvdoctor.toml:5, override 2: there",
        ),
        ("[[overrides]]\nmodels = ['a']\njobs = 2", "jobs is set once for all models, above the overrides"),
        ("[[overrides]]\nmodels = ['../a']", "leaves the folder of the policy"),
        ("seed = ]", "kvdoctor.toml is not valid TOML: Invalid value (at line 1"),
        ("seed = 1\nseed = 2\n\n", "kvdoctor.toml is not valid TOML: Cannot overwrite a value (at line 2"),
        ("a = " + "[" * 5000, "kvdoctor.toml"),
    ],
)
def test_what_no_policy_says_is_refused_by_file_line_and_key(text: str, words: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith("kvdoctor.toml")
    assert words in said


def test_the_table_of_pyproject_is_read_and_other_tables_are_nobody_s_business(tmp_path: Path) -> None:
    policy = read(tmp_path, "[tool.ruff]\nx = 1\n[tool.kvdoctor]\nseed = 4\n", "pyproject.toml")
    assert policy is not None
    assert (policy.values, policy.place) == ({"seed": 4}, "pyproject.toml [tool.kvdoctor]")
    assert read(tmp_path, "[tool.ruff]\nx = 1\n", "pyproject.toml") is None
    assert read(tmp_path, "tool = 3\n", "pyproject.toml") is None
    assert read(tmp_path, "[tool.ruff\n", "pyproject.toml") is None
    assert "is not valid TOML" in refusal(tmp_path, "[tool.kvdoctor\n", "pyproject.toml")
    assert "must be a table" in refusal(tmp_path, "[tool]\nkvdoctor = 1\n", "pyproject.toml")
    text = "[project]\nseed = 1\n\n[tool.kvdoctor]\n[[tool.kvdoctor.overrides]]\nmodels = ['a']\nsead = 1\n"
    assert refusal(tmp_path, text, "pyproject.toml").startswith("pyproject.toml:7, override 1: there is no key 'sead'")


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "kvdoctor.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 2\r\n")
    policy = read_policy("kvdoctor.toml", file)
    assert policy is not None
    assert policy.values == {"seed": 2}
    file.write_bytes(b"seed = \xff")
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 7\)"):
        read_policy("kvdoctor.toml", file)
    with file.open("wb") as sparse:
        sparse.truncate(2 << 20)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read_policy("kvdoctor.toml", file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UsageError, match="it is a folder"):
        find_policy(tmp_path)
    file.rmdir()
    file.symlink_to("kvdoctor.toml")
    with pytest.raises(UsageError, match=r"cannot be read: .*--no-config"):
        find_policy(tmp_path)


# Finding


def test_the_nearest_file_up_to_the_root_of_the_repository(tmp_path: Path) -> None:
    repository, below = tmp_path / "repository", tmp_path / "repository" / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "kvdoctor.toml").write_text("seed = 1")
    assert find_policy(below).file is None  # no repository: what lies above is anybody's
    (repository / ".git").mkdir()
    assert find_policy(below).file is None  # above the repository
    (repository / "pyproject.toml").write_text("[tool.kvdoctor]\nseed = 2")
    assert (find_policy(below).file, find_policy(below).values) == ("../../pyproject.toml", {"seed": 2})
    (repository / "kvdoctor.toml").write_text("seed = 3")
    assert find_policy(below).values == {"seed": 3}
    (below.parent / "pyproject.toml").write_text("[tool.ruff]")  # somebody else's
    assert find_policy(below).values == {"seed": 3}
    (below / "kvdoctor.toml").write_text("seed = 4")
    assert (find_policy(below).file, find_policy(below).values) == ("kvdoctor.toml", {"seed": 4})


# Matching


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("exports/t5/model.onnx", "exports/whisper/onnx/model.onnx", "exports/README.md", "exports/.hidden/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "exports" / "failed").mkdir()
    (tmp_path / "exports" / "loop").symlink_to(tmp_path / "exports")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("exports/*", ["exports/failed", "exports/loop", "exports/t5", "exports/whisper"]),
        ("exports/t?/", ["exports/t5"]),
        ("./exports/[tw]*", ["exports/t5", "exports/whisper"]),
        ("exports/.h*", ["exports/.hidden"]),
        ("**", ["exports/t5", "exports/whisper/onnx"]),
        ("exports/**", ["exports/t5", "exports/whisper/onnx"]),
        ("**/*.onnx", ["exports/t5/model.onnx", "exports/whisper/onnx/model.onnx"]),
        ("exports/**/model.onnx", ["exports/t5/model.onnx", "exports/whisper/onnx/model.onnx"]),
        ("exports/none*", []),
        ("exports/t5", ["exports/t5"]),
    ],
)
def test_what_patterns_match(pattern: str, found: list[str], tree: Path) -> None:
    assert models_at(tree, pattern) == found
    assert all(fits(path, pattern) for path in found)


def test_an_override_means_a_folder_and_what_lies_in_it() -> None:
    assert fits("exports/t5/onnx/decoder_model.onnx", "exports/t*")
    assert not fits("exports", "exports/t*")
    assert not fits("exports/a/t5", "exports/t*")
    assert fits("exports/a/t5", "**/t*")
    assert fits("exports/a/t5", ".")


def test_models_are_named_as_seen_from_the_working_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / ".git").mkdir()
    (tree / "kvdoctor.toml").write_text(
        "models = ['exports/t5', 'exports/[tw]*', 'exports/none*']\nbaseline = 'b.json'"
    )
    monkeypatch.chdir(tree / "exports")
    policy = find_policy()
    with pytest.raises(UsageError, match=r"\.\./kvdoctor.toml: models: 'exports/none\*' matches no folder"):
        policy.models()
    (tree / "kvdoctor.toml").write_text("models = ['exports/t5', 'exports/[tw]*']\nbaseline = 'b.json'")
    assert find_policy().models() == ("t5", "whisper")
    assert find_policy().complete(None, {})["baseline"] == "../b.json"
    assert find_policy().relative("t5/model.onnx") == "exports/t5/model.onnx"
    assert find_policy().relative("../../elsewhere") is None
    (tree.parent / "link").symlink_to(tree)
    there = read_policy(str(tree.parent / "link" / "kvdoctor.toml"))
    assert there is not None
    assert there.relative("t5") == "exports/t5"


# What weighs more

VALUES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 99),
        "consumer": st.sampled_from(["plain", "held"]),
        "fail-on": st.sampled_from(["note", "warning", "error", "never"]),
        "ignore": st.lists(st.sampled_from(["KV2", "KV301", "names-mislead"]), max_size=2),
        "timeout": st.floats(0.5, 1000, allow_nan=False),
        "thorough": st.booleans(),
        "tolerances": st.fixed_dictionaries({}, optional={"float16": st.sampled_from([0.01, 0.05])}),
    },
)
PATTERNS = st.lists(st.sampled_from(["exports/*", "exports/t5", "exports/w*", "**", "other"]), min_size=1, max_size=2)
OVERRIDES = st.lists(st.tuples(PATTERNS, VALUES), max_size=3)


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def as_toml(values: dict[str, Any]) -> str:
    def word(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {word(item)}" for key, item in value.items()) + " }"
        return json.dumps(value)

    return "".join(f"{key} = {word(value)}\n" for key, value in values.items())


@settings(max_examples=60, deadline=None)
@given(VALUES, OVERRIDES, VALUES)
def test_the_command_line_then_the_last_override_then_the_policy(
    tmp_path_factory: pytest.TempPathFactory,
    whole: dict[str, Any],
    overrides: list[tuple[list[str], dict[str, Any]]],
    said: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("policy")
    tables = ("[[overrides]]\n" + as_toml({"models": models, **values}) for models, values in overrides)
    policy = read(folder, as_toml(whole) + "".join(tables))
    assert policy is not None
    assert policy.values == whole
    assert [(list(one.models), dict(one.values)) for one in policy.overrides] == overrides
    found = policy.effective(str(folder / "exports" / "t5"), said)
    assert set(found) == set(KEYS)
    for name, value in found.items():
        layers = [(said, SAID)]
        for number, (models, values) in reversed(list(enumerate(overrides, 1))):
            if {"exports/*", "exports/t5", "**"} & set(models):
                layers.append((values, f"kvdoctor.toml, override {number}"))
        layers += [(whole, "kvdoctor.toml"), ({name: _plain(KEYS[name].default)}, DEFAULT)]
        assert (value.value, value.origin) == next((layer[name], place) for layer, place in layers if name in layer)
    outside = policy.effective(str(folder.parent / "exports" / "t5"), {})
    assert not [value for value in outside.values() if "override" in value.origin]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KEYS)), st.integers(0, 9), st.sampled_from(string.ascii_lowercase))
def test_a_slip_of_the_finger_is_refused_with_the_key_that_was_meant(
    tmp_path_factory: pytest.TempPathFactory, key: str, place: int, letter: str
) -> None:
    slip = key[: place % len(key)] + letter + key[place % len(key) + 1 :]
    if slip in KEYS:
        return
    said = refusal(tmp_path_factory.mktemp("policy"), f"{slip} = 1")
    meant = re.search(r"did you mean '(.*)'\?", said)
    assert meant[1] in KEYS if meant else "it takes models, " in said
    if len(key) > 5:
        assert meant is not None
        assert meant[1] == key


def test_the_gate_takes_every_key() -> None:
    command = find_command("gate")
    assert command is not None
    parameters = {parameter.name: parameter for parameter in command.params}
    taken = {option.key: option for option in options_of("gate")}
    for name, key in KEYS.items():
        if name != "models":
            assert taken[name] == key
            assert key.flag is None or key.keyword in parameters


# The commands


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "exports" / "t5").mkdir(parents=True)
    (tmp_path / "exports" / "gpt2").mkdir()
    text = "models = ['exports/*']\nseed = 2\nfail-on = 'warning'\n[[overrides]]\nmodels = ['exports/t*']\nseed = 3\n"
    (tmp_path / "kvdoctor.toml").write_text(text + "[[overrides]]\nmodels = ['exports/none']\nthorough = true\n")
    return tmp_path


def test_config_says_what_holds_and_where_it_comes_from(project: Path) -> None:
    page = kvdoctor(project, "config", "--fail-on", "never")
    assert page.returncode == 0, page.stderr
    assert page.stdout.startswith("policy: kvdoctor.toml\n\nexports/gpt2\n")
    lines = [" ".join(line.split()) for line in page.stdout.splitlines()]
    assert "seed 2 kvdoctor.toml" in lines
    assert "seed 3 kvdoctor.toml, override 1" in lines
    assert 'fail-on "never" command line' in lines
    assert "timeout 300.0 default" in lines
    assert lines[-1] == "override 2 fits none of these: exports/none"
    body = json.loads(kvdoctor(project / "exports", "config", "t5", "--format", "json").stdout)
    # Without a repository only the working folder is looked into.
    assert (body["schema"], body["policy"]) == ("kvdoctor/config/1", None)
    assert [model["path"] for model in body["models"]] == ["t5"]
    assert body["models"][0]["values"]["seed"] == {"value": 0, "from": "default"}
    none = kvdoctor(project, "config", "--no-config", "exports/t5")
    assert none.stdout.startswith("policy: none; every value is a default\n")


def test_wrong_calls_name_what_to_do(project: Path) -> None:
    both = kvdoctor(project, "gate", "--config", "kvdoctor.toml", "--no-config")
    assert (both.returncode, "not both" in both.stderr) == (2, True)
    lost = kvdoctor(project, "gate", "--config", "lost.toml", "exports/t5")
    assert (lost.returncode, "lost.toml cannot be read: No such file" in lost.stderr) == (2, True)
    (project / "pyproject.toml").write_text("[project]\n")
    other = kvdoctor(project, "gate", "--config", "pyproject.toml")
    assert (other.returncode, "has no [tool.kvdoctor]" in other.stderr) == (2, True)
    page = kvdoctor(project, "config", "--output", "json=x.json")
    assert (page.returncode, (project / "x.json").exists()) == (2, False)
    none = kvdoctor(project, "gate", "--no-config")
    assert (none.returncode, "give the PATH of a model; no policy was found" in none.stderr) == (2, True)
    (project / "kvdoctor.toml").write_text("sed = 1\n")
    slip = run("step-test", "exports/t5", cwd=project)
    assert slip.returncode == 2
    assert slip.stderr == "kvdoctor: kvdoctor.toml:1: there is no key 'sed'; did you mean 'seed'?\n"


def test_a_policy_in_the_folder_of_a_model_is_data(tmp_path: Path) -> None:
    model = load_all()["cross-cache-emptied"].write(tmp_path / "model")
    folder = model if model.is_dir() else model.parent
    (folder / "kvdoctor.toml").write_text("ignore = ['KV']\nwrong = 1\n")
    found = kvdoctor(tmp_path, "inspect", str(folder), "--format", "json")
    assert "policy" not in json.loads(found.stdout)["arguments"]
    assert found.returncode == 1


def test_inspect_follows_the_policy(tmp_path: Path) -> None:
    model = load_all()["cross-cache-emptied"].write(tmp_path / "model")
    folder = model if model.is_dir() else model.parent
    (tmp_path / "kvdoctor.toml").write_text(
        "ignore = ['KV203']\n[[overrides]]\nmodels = ['model']\nconsumer = 'held'\n"
    )
    report = json.loads(kvdoctor(tmp_path, "inspect", str(folder), "--format", "json").stdout)
    assert report["arguments"]["ignore"] == ["KV203"]
    assert report["arguments"]["consumer"] == "held"
    assert report["arguments"]["policy"] == "kvdoctor.toml"
    said = json.loads(kvdoctor(tmp_path, "inspect", str(folder), "--ignore", "KV1", "--format", "json").stdout)
    assert said["arguments"]["ignore"] == ["KV1"]


# Tolerances


def test_a_requested_tolerance_replaces_the_one_of_the_table() -> None:
    requested = {"float16": 0.05}
    assert find_tolerance("float16", requested).passes == 0.05
    assert find_tolerance("float16", requested).fails == pytest.approx(0.15)
    assert find_tolerance("float", requested) == TOLERANCES["float"]
    assert find_tolerance("float16", {}) == TOLERANCES["float16"]


@pytest.mark.parametrize("exactness", TOLERANCES)
def test_bounds_leave_what_is_no_noise_a_failure(exactness: str) -> None:
    least, most = bounds(exactness)
    assert least < TOLERANCES[exactness].passes < most
    assert find_tolerance(exactness, {exactness: most}).fails <= 1
    assert [exactness in line for line in list_loosened({exactness: most})] == [True]
    assert not list(list_loosened({exactness: least}))


def test_tolerances_reach_the_worker_and_are_told(tmp_path: Path) -> None:
    model = load_all()["decoder-only-half-cache-healthy"].write(tmp_path / "model")
    strict = step_test(str(model), Options(tolerances={"float16": 0.0003}))
    runs = {run.experiment: run for run in strict.runs}
    assert runs["plain-loop"].by_rounding
    assert strict.arguments["tolerances"] == {"float16": 0.0003}
    assert strict.notes == ()
    loose = step_test(str(model), Options(tolerances={"float16": 0.1}))
    assert not any(run.by_rounding for run in loose.runs)
    assert loose.notes == (
        "the policy loosens the tolerance of float16: logits within 0.1 standard deviations pass, where kvdoctor's own "
        "limit is 0.02",
    )


# The page


def test_the_table_of_the_page_is_the_one_of_the_code() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_policy
    finally:
        sys.path.remove(str(ROOT / "docs"))
    page = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    assert page == make_policy.page()
    for exactness, own in TOLERANCES.items():
        least, most = bounds(exactness)
        assert f"| `{exactness}` | {own.passes:g} | {least:g} | {most:g} |" in page


def test_the_cache_of_the_policy_and_of_the_command_line(project: Path) -> None:
    (project / "kvdoctor.toml").write_text("jobs = 2\ncache = false\n")
    body = json.loads(kvdoctor(project, "config", "--format", "json").stdout)
    values = body["models"][0]["values"]
    assert (body["models"][0]["path"], values["cache"]["value"], values["jobs"]["value"]) == (None, False, 2)
    (project / "kvdoctor.toml").write_text("jobs = 2\n")
    body = json.loads(kvdoctor(project, "config", "--no-cache", "--jobs", "1", "--format", "json").stdout)
    values = body["models"][0]["values"]
    assert values["cache"] == {"value": False, "from": "command line"}
    assert values["jobs"] == {"value": 1, "from": "command line"}
