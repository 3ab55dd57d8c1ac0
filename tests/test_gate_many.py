"""Three hundred models, of which some are broken, huge, or kill the process that runs them: one report for each."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bad_models as bad
import onnx
import psutil
import pytest
from bad_models import GPT2, MARIAN, saved
from onnx import TensorProto

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="sparse files, and signals of POSIX")]

HEALTHY, UNHEALTHY, INCOMPLETE = "healthy", "unhealthy", "incomplete"
OPTIONS = ("--timeout", "3", "--max-memory", "700", "--format", "json", "--no-cache")


def declared_huge(folder: Path) -> Path:
    """Weights of 3 GB that are a hole in a sparse file, and that one decode step would need."""
    model = bad.decoder()
    head = next(one for one in model.graph.initializer if one.name == "head")
    head.CopyFrom(
        TensorProto(name="head", data_type=TensorProto.FLOAT, dims=[4, 3 << 26], data_location=TensorProto.EXTERNAL)
    )
    head.external_data.add(key="location", value="weights.bin")
    saved(model, folder)
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(3 << 30)
    return folder


def registry(root: Path, count: int) -> dict[str, str | None]:
    """Folders of models, with the verdict that each must have; None where both of the last two are right."""
    tiny = bad.decoder().SerializeToString()
    odd: list[tuple[str, str | None]] = []

    def add(name: str, verdict: str | None, content: bytes | onnx.ModelProto) -> None:
        saved(content, root / name)
        odd.append((name, verdict))

    add("empty-file", INCOMPLETE, b"")
    add("cut-short", INCOMPLETE, bad.gpt2_bytes()[:1000])
    add("noise", INCOMPLETE, bytes(range(256)) * 40)
    add("pointer", INCOMPLETE, b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n")
    add("deep", None, bad.nested(2000))
    add("classifier", INCOMPLETE, bad.classifier())
    add("kills", INCOMPLETE, bad.decoder(*bad.dividing_out_of_range()))
    add("hangs", INCOMPLETE, bad.decoder(*bad.looping_for_ever()))
    add("eats", INCOMPLETE, bad.decoder(*bad.allocating()))
    declared_huge(root / "huge")
    odd.append(("huge", None))
    hole = root / "hole"
    hole.mkdir()
    with (hole / "model.onnx").open("wb") as file:
        file.truncate(5 << 30)
    odd.append(("hole", INCOMPLETE))
    (root / "nothing").mkdir()
    odd.append(("nothing", INCOMPLETE))
    for name, source, verdict in (("marian", MARIAN, UNHEALTHY), ("gpt2", GPT2, HEALTHY)):
        shutil.copytree(source, root / name)
        odd.append((name, verdict))
    expected = dict(odd)
    for number in range(count - len(odd)):
        folder = root / f"m{number:03d}"
        saved(_varied(tiny, number), folder)
        expected[folder.name] = HEALTHY
    return expected


def _varied(content: bytes, number: int) -> onnx.ModelProto:
    """The same model with other weights."""
    model = onnx.load_from_string(content)
    head = next(one for one in model.graph.initializer if one.name == "head")
    values = onnx.numpy_helper.to_array(head) * (1 + number / 1000)
    head.CopyFrom(onnx.numpy_helper.from_array(values.astype("float32"), "head"))
    return model


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
    assert process.stderr.read() == b""
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
