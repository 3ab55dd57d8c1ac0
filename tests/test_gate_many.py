"""Three hundred models, of which some are broken, huge, or kill the process that runs them: one report for each."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.many_models import INCOMPLETE, OPTIONS, UNHEALTHY, registry

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="sparse files, and signals of POSIX")]


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
