"""How `gate` runs many models: side by side, again only what has changed, and whole or not at all."""

import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import bad_models as bad
from support.bad_models import GPT2, MARIAN, as_json, call, copied, saved
from support.many_models import INCOMPLETE, OPTIONS, UNHEALTHY, registry
from support.processes import assert_gone, started
from support.text_fixtures import load_all

import kvdoctor
from kvdoctor.errors import UsageError
from kvdoctor.gating import diagnose_job as diagnosing
from kvdoctor.gating import run as gate_run
from kvdoctor.gating import stored_reports
from kvdoctor.gating.cache import Cache
from kvdoctor.gating.cache_key import FileDigests, compute_key, digest_source
from kvdoctor.gating.jobs import GateJob, ProcessLost
from kvdoctor.gating.process_pool import ProcessPool
from kvdoctor.gating.stored_reports import ReportStore
from kvdoctor.gating.verdict import judge
from kvdoctor.model.files import looked_at
from kvdoctor.options import Options, options_of
from kvdoctor.records import from_plain, to_plain
from kvdoctor.report import formats
from kvdoctor.report.document import Report
from kvdoctor.report.json_format import report_of


def without_measured(report: dict[str, Any]) -> str:
    return json.dumps({**report, "measured": None})


# --- which models ---


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """Exports of which one is an encoder, and two folders without a model."""
    saved(b"", tmp_path / "exports" / "cut-short")
    for name in ("gpt2", "gpt2-draft"):
        copied(GPT2, tmp_path / "exports" / name)
    for name in ("docs", "torch/deep"):
        (tmp_path / "exports" / name).mkdir(parents=True)
    return tmp_path


def test_models_are_excluded_and_what_was_not_checked_is_listed(exports: Path) -> None:
    done = call("gate", "exports", "--static", "--exclude", "*-draft", cwd=exports)
    assert done.code == 3
    said = tuple(f"left out: exports/{one}" for one in ("gpt2-draft (excluded)", "docs (no model)", "torch (no model)"))
    assert all(line in done.out.splitlines() for line in said)
    lines = [line.split(": ")[1:3] for line in done.err.splitlines()]
    assert lines == [["1 of 2", "exports/cut-short"], ["2 of 2", "exports/gpt2"]]
    quiet = call("gate", "exports", "--static", "--exclude", "*-draft", "-q", "--format", "json", cwd=exports)
    assert quiet.err == ""
    left_out = [(one["path"], one["reason"]) for one in json.loads(quiet.out)["left_out"]]
    assert left_out == [("exports/gpt2-draft", "excluded"), *((f"exports/{f}", "no model") for f in ("docs", "torch"))]
    assert "--exclude leaves no model" in call("gate", "exports", "--exclude", "exports/*", cwd=exports).err


@pytest.mark.parametrize(("codes", "code"), [("unreadable", 0), ("KV0", 0), ("KV301", 3), ("everything", 3)])
def test_what_may_stay_incomplete_is_said_and_no_exit_code(codes: str, code: int, exports: Path) -> None:
    done = call("gate", "exports", "--static", "--allow-incomplete", codes, cwd=exports)
    assert done.code == code
    assert ("incomplete, allowed" in done.out) == (code == 0)
    assert call("gate", "exports/cut-short", "--static", "--allow-incomplete", codes, cwd=exports).code == 3
    assert "'KV999' names no check" in call("gate", "exports", "--allow-incomplete", f"{codes},KV999", cwd=exports).err
    reason = f'[[overrides]]\nmodels = ["exports/cut*"]\nallow-incomplete = {{ {codes} = "no such device" }}\n'
    (exports / "kvdoctor.toml").write_text(reason, encoding="utf-8")
    done = call("gate", "exports", "--static", cwd=exports)
    assert (done.code, "allowed: no such device" in done.out) == (code, code == 0)


# --- side by side ---


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A healthy one, a sick one, one that cannot be read, and one that kills its worker."""
    folder = tmp_path_factory.mktemp("models")
    killer = saved(bad.decoder(*bad.dividing_out_of_range()), folder / "killer")
    return [saved(b"", folder / "empty"), copied(GPT2, folder / "gpt2"), killer, copied(MARIAN, folder / "marian")]


@pytest.fixture(scope="module")
def first(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[bad.Result, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return as_json("gate", *models, "--jobs", "3", "--cache-dir", cache), cache


def test_every_report_is_what_the_model_alone_gives(first: tuple[bad.Result, Path], models: list[Path]) -> None:
    result = first[0]
    assert result.code == 1
    assert [report["model"]["path"] for report in result.report["reports"]] == [str(path) for path in models]
    for path, report in zip(models, result.report["reports"], strict=True):
        alone = as_json("gate", path, "--no-cache").report["reports"][0]
        assert without_measured(alone) == without_measured(report)


def test_what_has_not_changed_is_not_run_again(first: tuple[bad.Result, Path], models: list[Path]) -> None:
    """Only what was diagnosed to the end: not what killed its worker, and not what could not be read."""
    result, cache = first
    again = as_json("gate", *models, "--cache-dir", cache)
    kept = [bool(report["measured"].get("cached")) for report in again.report["reports"]]
    assert kept == [False, True, False, True]
    assert list(map(without_measured, again.report["reports"])) == list(map(without_measured, result.report["reports"]))
    assert (cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert (cache / ".gitignore").read_text() == "*\n"
    text = call("gate", models[1], models[3], "--cache-dir", cache, "-q").out
    assert text.splitlines()[-1].endswith(
        "1 of 2 models healthy, 1 unhealthy; 2 unchanged and not run again \u00b7 exit 1"
    )


def test_reports_whose_runs_are_stored_are_the_same(
    first: tuple[bad.Result, Path], models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, cache = first
    monkeypatch.setattr(stored_reports, "MOST_HELD", 0)
    done = kvdoctor.gate(models, cache_dir=cache, jobs=2)
    assert [isinstance(one.runs, stored_reports.ReadOnDemand) for one in done.reports] == [True] * len(models)
    assert pickle.loads(pickle.dumps(done.reports)) == done.reports  # noqa: S301 - our own
    assert [one.runs[:1] for one in done.reports] == [tuple(one.runs)[:1] for one in done.reports]
    stored = [without_measured(one) for one in done.to_dict()["reports"]]
    assert stored == list(map(without_measured, result.report["reports"]))
    assert kvdoctor.render(done).splitlines()[-1].startswith("gate: unhealthy; 1 of 4 models healthy")


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_report_that_is_written_is_not_in_memory(
    first: tuple[bad.Result, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many models, no more than three at a time are."""
    monkeypatch.setattr(stored_reports, "MOST_HELD", 0)
    store, get, seen = ReportStore(), ReportStore.get, list[weakref.ref[Any]]()
    for number in range(40):
        store.put(number, report_of(first[0].report["reports"][number % 4], "it"))

    def watched(_: ReportStore, number: int) -> Report:
        assert sum(one() is not None for one in seen) <= 3
        report = get(store, number)
        seen.append(weakref.ref(report.runs))
        return report

    monkeypatch.setattr(ReportStore, "get", watched)
    done = judge(store.all())
    assert len("".join(formats.write_gate(done.outline, done.reports, done.summary_lines(), name))) > 500


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """The processes do not load the caller's own module again."""
    one, other = (saved(bad.decoder(), tmp_path / name) for name in ("one", "other"))
    script = tmp_path / "script.py"
    script.write_text(
        "from kvdoctor.gating import jobs, run\nfrom kvdoctor.options import Options\n"
        f"done = run.gate([jobs.GateJob({str(one)!r}, Options()), jobs.GateJob({str(other)!r}, Options())])\n"
        "print(done.verdict, done.exit_code)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("healthy 0\n", "")


def test_nothing_is_run_where_one_path_is_wrong(tmp_path: Path) -> None:
    result = call("gate", GPT2, tmp_path / "nothing", "--no-cache", seconds=5)
    assert result.code == 2
    assert "does not exist" in result.err


# --- processes that end ---


def slots(process: subprocess.Popen[str], count: int, but: tuple[int, ...] = ()) -> list[psutil.Process]:
    """Wait until that many slots run, each with its worker."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        children = [child for child in psutil.Process(process.pid).children() if child.pid not in but]
        if len(children) >= count and all(child.children() for child in children):
            return children
        time.sleep(0.05)
    raise AssertionError("the slots were not started")


@contextmanager
def gate_that_never_ends(tmp_path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    folders = [saved(bad.decoder(*bad.looping_for_ever()), tmp_path / f"model{number}") for number in range(3)]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with started("gate", *folders, "--no-cache", "--jobs", "2", *more, scratch=scratch) as process:
        yield process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_it_ends_at_once_and_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with gate_that_never_ends(tmp_path, "--output", f"json={report}") as process:
        running = slots(process, 2)
        below = [child for slot in running for child in (slot, *slot.children(recursive=True))]
        time.sleep(0.5)
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
        assert_gone(below)
    assert process.returncode == code
    assert "Traceback" not in error
    assert not report.exists()
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.slow
def test_a_lost_process_costs_its_own_model(tmp_path: Path) -> None:
    """Given to another once; after the second loss it is a finding, and the verdict stays open."""
    sick = saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "sick")
    well = [saved(bad.decoder(), tmp_path / name) for name in ("one", "other")]
    with started("gate", sick, *well, "--no-cache", "--jobs", "2", "--format", "json") as process:
        seen: tuple[int, ...] = ()
        for _ in range(2):
            # The process with the sick model is the one that stays.
            end = time.monotonic() + 120
            while time.monotonic() < end and (busy := _burning(process, seen)) is None:
                time.sleep(0.1)
            assert busy is not None
            seen = (*seen, busy.pid)
            busy.kill()
        output, error = process.communicate(timeout=120)
    assert [line.split(": ")[1] for line in error.splitlines()] == ["1 of 3", "2 of 3", "3 of 3"]
    assert process.returncode == 3
    lost, *others = json.loads(output)["reports"]
    assert [report["verdict"] for report in others] == ["healthy", "healthy"]
    assert lost["verdict"] == "incomplete"
    (finding,) = lost["findings"]
    assert (finding["code"], finding["name"]) == ("KV011", "worker-died")
    assert "lost 2 times; the last time, it ended by signal SIGKILL" in finding["observed"]


def _burning(process: subprocess.Popen[str], but: tuple[int, ...]) -> psutil.Process | None:
    """The slot whose worker has computed for longer than a healthy model takes."""
    for slot in psutil.Process(process.pid).children():
        if slot.pid not in but and any(child.cpu_times().user > 2.5 for child in slot.children()):
            return slot
    return None


class _Broken:
    """What can be pickled halfway, after as much as fills a pipe."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not to be pickled")


def _same(value: Any) -> Any:
    return value


def test_what_cannot_be_sent_leaves_no_process_out_of_step() -> None:
    with ProcessPool(1) as slots:
        assert slots.submit(abs, -1).result(20) == 1
        for stuck in ([b"x" * (1 << 17), _Broken()], lambda: 0):
            with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError)):
                slots.submit(repr, stuck).result(20)
            assert slots.submit(abs, -2).result(20) == 2
        with pytest.raises(ZeroDivisionError):
            slots.submit(divmod, 1, 0).result(20)
        with pytest.raises(ProcessLost):  # a function that the process cannot find
            slots.submit(_same, 1).result(20)
        assert slots.submit(abs, -3).result(20) == 3


# --- the cache ---


@pytest.fixture
def kept(first: tuple[bad.Result, Path], models: list[Path], tmp_path: Path) -> tuple[Cache, GateJob, Report]:
    """A report of a copy of the healthy model, in a cache of its own."""
    job = GateJob(str(models[1]), Options())
    document = dict(first[0].report["reports"][1])
    for run in document["runs"]:
        run.setdefault("node_names", [])
    report = from_plain(Report, {name: document[name] for name in to_plain(_blank(job))})
    cache = Cache(tmp_path / "cache")
    cache.keep(cache.key(job), job, report)
    found = cache.find(cache.key(job), job)
    assert found is not None
    assert found.measured.pop("cached")
    assert found == report
    return cache, job, report


def _blank(job: GateJob) -> Report:
    from kvdoctor.gating.diagnose_job import report_not_diagnosed

    return report_not_diagnosed(job, "")


def entry(cache: Cache) -> Path:
    (file,) = (cache._folder / "reports").glob("*/*.json")
    return file


def forged(line: bytes, body: dict[str, Any], pack: Callable[[bytes], bytes] = zlib.compress) -> bytes:
    """An entry with another body, and the head that fits it."""
    content = pack(json.dumps(body).encode())
    return json.dumps({**json.loads(line), "sha256": hashlib.sha256(content).hexdigest()}).encode() + b"\n" + content


def unpacked(body: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(zlib.decompress(body))
    return document


BROKEN = {
    "empty": lambda *_: b"",
    "cut short": lambda head, body: head + b"\n" + body[:-10],
    "a byte changed": lambda head, body: head + b"\n" + body[:40] + bytes([body[40] ^ 1]) + body[41:],
    "no JSON": lambda *_: b"\xff\x00" * 50,
    "a list": lambda *_: b"[]\n[]",
    "deep": lambda _, body: b"[" * 100_000 + b"\n" + body,
    "not compressed": lambda head, body: forged(head, unpacked(body), bytes),
    "no end": lambda head, body: forged(head, unpacked(body), lambda content: zlib.compress(content)[:-4]),
    "another key": lambda head, body: head.replace(b'"key":"', b'"key":"0') + b"\n" + body,
    "another schema": lambda head, body: head.replace(b"cache/1", b"cache/9") + b"\n" + body,
    "a field less": lambda head, body: forged(head, {k: v for k, v in unpacked(body).items() if k != "model"}),
    "a field of another type": lambda head, body: forged(head, {**unpacked(body), "seed": "0"}),
    "of another model": lambda head, body: forged(
        head, {**unpacked(body), "model": {**unpacked(body)["model"], "path": "other"}}
    ),
    "another verdict": lambda head, body: forged(head, {**unpacked(body), "verdict": "unhealthy"}),
    "not complete": lambda head, body: forged(
        head, {**unpacked(body), "not_checked": [{"stack": None, "code": "*", "reason": "", "essential": True}]}
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_entry_is_a_miss(how: str, kept: tuple[Cache, GateJob, Report]) -> None:
    cache, job, report = kept
    file = entry(cache)
    head, _, body = file.read_bytes().partition(b"\n")
    broken = BROKEN[how](head, body)
    assert broken != file.read_bytes()
    file.write_bytes(broken)
    assert cache.find(cache.key(job), job) is None
    cache.keep(cache.key(job), job, report)
    assert cache.find(cache.key(job), job) is not None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_in_the_cache_is_not_waited_for(kept: tuple[Cache, GateJob, Report]) -> None:
    cache, job, _ = kept
    file, key = entry(cache), cache.key(job)
    for place in (file, file.parents[2] / "contents.json"):
        place.unlink(missing_ok=True)
        os.mkfifo(place)
    assert cache.find(key, job) is None
    Cache(file.parents[2], remote=False)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"x"), True),
        (lambda folder: (folder / "config.json").write_text("{}"), True),
        (lambda folder: (folder / "genai_config.json").write_text("{}"), True),
        (lambda folder: (folder / "model_fp16.onnx").write_bytes(b""), True),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), True),
        (lambda folder: (folder / "README.md").write_text("about"), False),
    ],
    ids=["model", "config", "new side-car", "new variant", "tokenizer", "readme"],
)
def test_what_a_key_depends_on(change: Any, other: bool, tmp_path: Path) -> None:
    folder = copied(GPT2, tmp_path / "model")
    job = GateJob(str(folder), Options())

    def key() -> str | None:
        return compute_key(job, FileDigests(tmp_path / "none"), remote=False)

    before = key()
    assert before == key()
    change(folder)
    assert (key() != before) == other


def test_options_that_matter_are_part_of_the_key(tmp_path: Path) -> None:
    contents = FileDigests(tmp_path)
    options = [Options(), Options(seed=1), Options(consumer="held"), Options(thorough=True), Options(fail_on="warning")]
    keys = {compute_key(GateJob(str(GPT2), given), contents, remote=False) for given in options}
    assert len(keys) == len(options)
    shown = Options(progress=print)
    assert compute_key(GateJob(str(GPT2), shown), contents, remote=False) in keys
    assert compute_key(GateJob(str(GPT2), Options(reference="CHECKPOINT")), contents, remote=False) is None
    assert re.fullmatch("[0-9a-f]{64}", digest_source())


def test_weights_outside_the_graph_count(tmp_path: Path) -> None:
    folder = bad.with_external_data(tmp_path / "model")
    cache = tmp_path / "cache"
    arguments = ("gate", folder, "--cache-dir", cache)
    assert "cached" not in as_json(*arguments).report["reports"][0]["measured"]
    assert as_json(*arguments).report["reports"][0]["measured"]["cached"]
    weights = folder / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    times = weights.stat()
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # size and time as before
    assert "cached" not in as_json(*arguments).report["reports"][0]["measured"]


def test_every_file_that_a_diagnosis_opens_is_part_of_its_key(models: list[Path]) -> None:
    """What it reads, and what it lists: seen by an audit hook, so that a new reader of files cannot be forgotten."""
    script = """
import os, sys
from pathlib import Path
folder, opened = sys.argv[1], set()
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        opened.add(os.path.abspath(arguments[0]))
sys.addaudithook(hook)
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
step_test(folder, Options())
print(*sorted(name for name in opened if name.startswith(folder + os.sep)), sep="\\n")
"""
    folder = models[3]
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    opened = {Path(line) for line in done.stdout.splitlines()}
    assert opened
    assert opened <= set(looked_at(folder)[1])


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "sub/weights.bin", "linked.bin", "config.json", None])
def test_a_model_that_changes_while_it_is_diagnosed_is_not_kept(
    name: str | None, kept: tuple[Cache, GateJob, Report], tmp_path: Path
) -> None:
    """Also where what changes is known only to the graph, and is first read after the run."""
    folder = copied(GPT2, tmp_path / "model")
    (folder / "sub").mkdir()
    for weights in ("weights.bin", "sub/weights.bin", "one", "other"):
        (folder / weights).write_bytes(weights.encode())
    (folder / "linked.bin").symlink_to("one")
    time.sleep(0.05)
    (model, *others) = kept[2].model.files
    named = ("weights.bin", "sub/weights.bin", "linked.bin")
    files = (replace(model, external=named), *others)
    report = replace(kept[2], model=replace(kept[2].model, files=files))
    job, cache = GateJob(str(folder), Options()), Cache(tmp_path / "other")
    key = cache.key(job)
    time.sleep(0.05)
    if name == "linked.bin":
        (folder / "link").symlink_to("other")
        (folder / "link").replace(folder / name)
    elif name is not None:
        (folder / name).write_bytes((folder / name).read_bytes())
    cache.keep(key, job, report)
    assert (tmp_path / "other").exists() == (name is None)


def test_a_fresh_change_is_not_trusted_to_its_time(tmp_path: Path) -> None:
    """As git does: a digest is remembered only once the file has rested."""
    file = tmp_path / "file"
    file.write_bytes(b"a")
    contents = FileDigests(tmp_path)
    contents.digest(file)
    contents.save()
    assert not (tmp_path / "contents.json").exists()
    assert contents.digest(tmp_path / "nothing") is None
    assert contents.digest(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": [[1], "x"]}', b"\xff", b'{"a": {"b": 1}}', b"[" * 100_000])
def test_a_broken_memory_of_digests_is_forgotten(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "contents.json").write_bytes(content)
    assert FileDigests(tmp_path).digest(GPT2 / "model.onnx") == FileDigests(tmp_path / "none").digest(
        GPT2 / "model.onnx"
    )


@pytest.mark.slow
def test_what_a_killed_gate_left_is_swept(kept: tuple[Cache, GateJob, Report]) -> None:
    cache = kept[0]
    root, beside = cache._folder, entry(cache).parent
    old = [root / ".contents.json.kvdoctor-1.partial", beside / ".a.json.kvdoctor-1.partial"]
    new, other = beside / ".b.json.kvdoctor-1.partial", root / ".mine.partial"
    for file in (*old, new, other):
        file.write_text("half")
    for file in (*old, other):
        os.utime(file, (time.time() - 4000,) * 2)
    cache.close()
    assert not any(file.exists() for file in old)
    assert new.exists()
    assert other.exists()
    assert entry(cache).exists()


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "reports").write_text("in the way")
    assert call("gate", saved(bad.decoder(), tmp_path / "model"), "--cache-dir", tmp_path / "cache").code == 0
    refused = call("gate", GPT2, "--cache-dir", tmp_path / "cache" / "reports")
    assert refused.code == 2
    assert "is no folder" in refused.err


# --- what the machine allows ---


def test_limits_of_a_container_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 29}\n")
    monkeypatch.setattr(gate_run, "_groups", lambda _: iter([tmp_path]))
    assert gate_run.count_cores() == 1
    assert gate_run.free_memory() <= (1 << 29) * 0.8
    assert gate_run.parallel_models(8, 300, None) == 2
    assert gate_run.parallel_models(8, 300, 300) == 1
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert gate_run.count_cores() == len(os.sched_getaffinity(0))
    assert gate_run.parallel_models(2, 1, None) == 1


@pytest.mark.parametrize(("most", "used", "idle"), gate_run.USES, ids=["v2", "v1"])
def test_files_that_were_read_take_no_memory(
    most: str, used: str, idle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a container has in use holds the cache of files, which the kernel takes back."""
    (tmp_path / most).write_text(f"{100 << 20}\n")
    (tmp_path / used).write_text(f"{90 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{idle} {60 << 20}\nactive_file 7\n")
    monkeypatch.setattr(gate_run, "_groups", lambda _: iter([tmp_path]))
    assert gate_run.free_memory() == int((70 << 20) * gate_run.SHARE)
    (tmp_path / "memory.stat").write_text(f"{idle} nonsense\n")
    assert gate_run.free_memory() == int((10 << 20) * gate_run.SHARE)


FOR_RUNS = {
    "jobs": 2,
    "cluster": "tcp://127.0.0.1:9",
    "cache_dir": "cache",
    "cache_size": 1024,
    "cache": False,
    "against": "golden.json",
    "thorough": True,
    "providers": "cuda",
    "timeout": 7.0,
    "max_memory": 4096,
    "sandbox": False,
    "tolerances": {"float16": 0.03},
}


def test_what_is_for_models_that_run_is_refused_where_none_is() -> None:
    assert {option.keyword for option in options_of("gate") if option.for_runs} == FOR_RUNS.keys()
    for name, value in FOR_RUNS.items():
        with pytest.raises(UsageError, match="is for models that are run, and --static runs none"):
            kvdoctor.gate(GPT2, static=True, **{name: value})  # type: ignore[arg-type]
    result = call("gate", GPT2, "--static", "--cache-dir", "cache")
    assert (result.code, "--cache-dir is for models that are run" in result.err) == (2, True)


def test_golden_numbers_of_a_policy_are_not_compared_where_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "kvdoctor.toml").write_text('against = "golden.json"\nthorough = true\n')
    done = kvdoctor.gate(GPT2, static=True, policy=kvdoctor.read_policy(tmp_path / "kvdoctor.toml"))
    (one,) = done.reports[0].not_checked
    assert (one.code, one.essential, done.exit_code) == ("KV321", False, 0)
    assert "golden.json, which the policy names: --static runs nothing" in one.reason


def test_a_folder_for_reports_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be made.*--no-cache"):
        kvdoctor.gate(GPT2, cache_dir=tmp_path / "file" / "below")


def test_a_folder_for_every_gate_is_no_word_on_this_one(tmp_path: Path) -> None:
    result = call("gate", GPT2, "--static", env={**os.environ, "KVDOCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert result.code == 0


def test_a_large_model_is_not_run_beside_others(tmp_path: Path) -> None:
    folder = saved(b"", tmp_path / "model")
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(1 << 40)
    assert gate_run.memory_needed(folder, None) > 1 << 42
    assert gate_run.memory_needed(folder, 100) == gate_run.IDLE_BYTES + 100 * gate_run.MIB
    assert gate_run.memory_needed(folder / "model.onnx", None) == gate_run.IDLE_BYTES


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sparse files, and signals of POSIX")
def test_three_hundred_models(tmp_path: Path) -> None:
    expected = registry(tmp_path, 300)
    begun, most = time.monotonic(), 0
    command = [sys.executable, "-m", "kvdoctor", "gate", *expected, "--jobs", "2", *OPTIONS]
    with (tmp_path / "out.json").open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE)
        while process.poll() is None:
            most = max(most, _resident(process.pid))
            time.sleep(0.05)
            assert time.monotonic() - begun < 400
    assert process.stderr is not None
    assert len(process.stderr.read().splitlines()) == 300
    assert process.returncode == 1
    document = json.loads((tmp_path / "out.json").read_text())
    assert [report["model"]["path"] for report in document["reports"]] == list(expected)
    for report in document["reports"]:
        wanted = expected[report["model"]["path"]]
        assert report["verdict"] in ((UNHEALTHY, INCOMPLETE) if wanted is None else (wanted,)), report["model"]
    # Two workers at their limit, which is looked at every 20 ms, and what reads and judges beside them.
    assert most < (2 * 1100 + 400) << 20


def _resident(pid: int) -> int:
    total = 0
    try:
        whole = psutil.Process(pid)
        for process in (whole, *whole.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.Error:
        pass
    return total


def test_an_unrelated_model_in_the_folder_changes_no_key(tmp_path: Path) -> None:
    folder = copied(GPT2, tmp_path / "models")
    (folder / "model.onnx").rename(folder / "first.onnx")
    job = GateJob(str(folder / "first.onnx"), Options())
    before = compute_key(job, FileDigests(tmp_path / "none"), remote=False)
    (folder / "second.onnx").write_bytes(b"another model")
    assert compute_key(job, FileDigests(tmp_path / "none"), remote=False) == before


def test_what_a_fault_leaves_unchecked_is_cached_and_what_a_limit_leaves_is_not(tmp_path: Path) -> None:
    open_and_faulty = load_all()["mask-not-offset-long"].write(tmp_path / "faulty")
    dying = saved(bad.decoder(*bad.allocating()), tmp_path / "dying")
    arguments = ("gate", open_and_faulty, dying, "--max-memory", "600", "--cache-dir", tmp_path / "cache")
    first, again = as_json(*arguments), as_json(*arguments)
    assert [report["verdict"] for report in first.report["reports"]] == ["unhealthy", "incomplete"]
    assert any(entry["essential"] for entry in first.report["reports"][0]["not_checked"])
    assert [bool(report["measured"].get("cached")) for report in again.report["reports"]] == [True, False]


def test_a_model_that_takes_all_memory_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Report:
        raise MemoryError

    monkeypatch.setattr(diagnosing, "step_test", fails)
    report = diagnosing.diagnose_job(GateJob(str(GPT2), Options()))
    assert (report.verdict, len(report.not_checked)) == ("incomplete", 1)
    assert "needs more memory than there is" in report.not_checked[0].reason


def test_a_cache_that_is_too_small_says_so(kept: tuple[Cache, GateJob, Report], tmp_path: Path) -> None:
    """All entries of this run are larger together than the folder may be: the first ones are removed."""
    _, job, report = kept
    cache = Cache(tmp_path / "small", max_bytes=3 * entry(kept[0]).stat().st_size)
    for number in range(8):
        other = replace(job, options=Options(seed=number))
        cache.keep(cache.key(other), other, report)
    left = len(list((tmp_path / "small" / "reports").glob("*/*.json")))
    assert (cache.close(), left) == (5, 8)
    assert len(list((tmp_path / "small" / "reports").glob("*/*.json"))) == 3


def test_models_that_wait_are_not_gone_through_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of 5,000 models is asked for a few times each; one that does not fit waits, and others overtake it."""
    asked: list[int] = []

    def needs(path: Path, _: int | None) -> int:
        asked.append(int(path.name))
        return 100 if path.name == "3" else 1

    monkeypatch.setattr(gate_run, "memory_needed", needs)
    monkeypatch.setattr(diagnosing, "diagnose_job", lambda job: job.path)
    jobs = {number: GateJob(str(number), Options()) for number in range(5000)}
    with ThreadPoolExecutor(2) as pool:
        order = [index for index, _ in gate_run._stream(pool, jobs, gate_run._Budget(2, memory=99))]
    assert sorted(order) == list(range(5000))
    assert len(asked) < 20_000
