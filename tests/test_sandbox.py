"""The sandbox of the worker: what a model names and what a library does in it, and that healthy models run as ever."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.bad_models import GPT2, call
from support.isolated import give_up

from kvdoctor.choices import CPU
from kvdoctor.decode.calls import save_call
from kvdoctor.decode.messages import Sandbox, TrialJob, TrialModel
from kvdoctor.gating.plan import MANY_MODELS, list_folders
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.environments import EnvironmentUnavailable
from kvdoctor.runtime.process import DEVICES, Limits, Worker, device_files, lie_within, readable
from kvdoctor.runtime.release_environments import prepare_environment

OLD = "1.18.1"
"""A release that opens external data wherever it lies; later ones refuse what lies outside."""


@pytest.fixture(scope="module")
def kernel() -> str:
    """What the kernel offers; without Landlock there is nothing to show."""
    with Worker(Limits()) as worker:
        found = worker.greet().sandbox
    if not found:
        pytest.skip("this kernel has no Landlock")
    return found


def with_weights_at(location: str, folder: Path) -> Path:
    """A model that adds four weights of a file."""
    folder.mkdir(exist_ok=True)
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=location)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weights])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("location", ["../outside.bin", "inside.bin", "link.bin"])
@pytest.mark.parametrize("sandbox", [True, False])
def test_external_data_outside_of_the_model_is_not_read(
    location: str, sandbox: bool, tmp_path: Path, kernel: str
) -> None:
    """A link in the folder is the user's own, as in a hub's cache: what it leads to is read."""
    try:
        python = prepare_environment(OLD, offline=False)
    except EnvironmentUnavailable as reason:
        give_up(str(reason))
    model = with_weights_at(location, tmp_path / "model")
    np.ones(4, np.float32).tofile(tmp_path / "outside.bin")
    np.ones(4, np.float32).tofile(model.with_name("inside.bin"))
    if location == "link.bin":
        model.with_name("link.bin").symlink_to(tmp_path / "outside.bin")
    with Runtime(Limits(sandbox=sandbox), str(python)) as runtime:
        feeds = tmp_path / "model" / "feeds.npz"
        save_call(feeds, {"x": np.ones(4, np.float32)})
        done = runtime.trial(TrialJob(model=TrialModel(model, model.parent, feeds)))
    outside = location.startswith("..")
    assert bool(done.error) == (sandbox and outside)
    assert bool(done.outputs) != bool(done.error)


PROBE = r"""
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
static int failed(int result) { return result < 0 ? errno : 0; }
int reads(const char *path) { return failed(open(path, O_RDONLY)); }
int writes(const char *path) { return failed(open(path, O_WRONLY | O_CREAT, 0600)); }
int removes(const char *path) { return failed(unlink(path)); }
int opens(int kind) { return failed(socket(AF_INET, kind, 0)); }
int starts(const char *path) { return system(path); }
"""
CALLER = """
import ctypes, json, sys
from kvdoctor.decode.messages import Sandbox
from kvdoctor.runtime.worker.sandbox import restrict
reads, writes, outside = sys.argv[1:]
restrict(Sandbox((reads,), (writes,)))
library = ctypes.CDLL(reads + "/probe.so")
paths = [one.encode() for one in (reads, writes, outside)]
results = {name: [getattr(library, name)(path + b"/file") for path in paths] for name in ("reads", "writes", "removes")}
results["opens"] = [library.opens(kind) for kind in (1, 2)]
results["starts"] = [library.starts(b"/bin/true")]
print(json.dumps(results))
"""


def test_a_library_reaches_neither_other_files_nor_the_network(tmp_path: Path, kernel: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folders = [tmp_path / name for name in ("model", "private", "outside")]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_text("x")
    (tmp_path / "probe.c").write_text(PROBE)
    built = [compiler, "-shared", "-fPIC", "-o", str(folders[0] / "probe.so"), str(tmp_path / "probe.c")]
    subprocess.run(built, check=True)
    done = subprocess.run(
        [sys.executable, "-c", CALLER, *map(str, folders)], capture_output=True, text=True, check=True
    )
    failed = {name: [bool(one) for one in codes] for name, codes in json.loads(done.stdout).items()}
    sockets = "no sockets" in kernel
    assert failed == {
        "reads": [False, False, True],
        "writes": [True, False, True],
        "removes": [True, False, True],
        "opens": [sockets, sockets],
        "starts": [True],
    }
    assert (folders[2] / "file").read_text() == "x"


def test_every_thread_of_a_worker_is_in_the_sandbox(tmp_path: Path, kernel: str) -> None:
    model, feeds = with_weights_at("inside.bin", tmp_path), tmp_path / "feeds.npz"
    (tmp_path / "inside.bin").write_bytes(bytes(16))
    save_call(feeds, {"x": np.zeros(4, np.float32)})
    with Runtime(Limits()) as runtime:
        runtime.trial(TrialJob(model=TrialModel(model, tmp_path, feeds)))
        threads = list(Path(f"/proc/{runtime._worker.greet().process}/task").iterdir())
        states = [(thread / "status").read_text(encoding="utf-8") for thread in threads]
    assert len(states) > 1
    assert all("NoNewPrivs:\t1" in state for state in states), kernel


def test_the_sandbox_is_said_and_can_be_left_out(tmp_path: Path, kernel: str) -> None:
    assert f"sandbox of the worker: {kernel}" in call("env").out
    with_it, without = (call("step-test", GPT2, *more) for more in ((), ("--no-sandbox",)))
    assert with_it.code == without.code == 0
    assert with_it.out.partition(" s ·")[0][:-4] == without.out.partition(" s ·")[0][:-4]


@pytest.mark.skipif(os.name == "nt", reason="links need privileges there")
def test_what_a_job_may_read(tmp_path: Path) -> None:
    inside, blobs = tmp_path / "model", tmp_path / "blobs"
    (inside / "weights").mkdir(parents=True)
    blobs.mkdir()
    for name in ("graph", "data"):
        (blobs / name).write_text("x")
    (inside / "model.onnx").symlink_to(blobs / "graph")
    (inside / "weights" / "w.bin").symlink_to(blobs / "data")
    job = TrialJob(model=TrialModel(inside / "model.onnx", inside, tmp_path / "absent.npz"))
    found = readable(job)
    assert lie_within(frozenset(map(str, (blobs / "graph", blobs / "data", inside / "model.onnx"))), found)
    assert not lie_within(frozenset({str(tmp_path / "other")}), found)
    (inside / "around").symlink_to(tmp_path)
    assert not lie_within(frozenset({str(tmp_path / "other")}), readable(job))
    assert device_files(job) == ()
    model = TrialModel(inside / "model.onnx", inside, tmp_path, provider="CUDAExecutionProvider")
    assert device_files(TrialJob(model=model, provider=CPU)) == DEVICES


def test_a_gate_may_read_a_folder_of_many_models(tmp_path: Path) -> None:
    many = [str(tmp_path / "many" / str(number)) for number in range(MANY_MODELS)]
    assert list_folders([*many, str(tmp_path / "one")]) == (str(tmp_path / "many"), str(tmp_path / "one"))
    assert Sandbox((), ()).devices == ()


LIMITED = """
import sys, numpy
from kvdoctor.cli.options import LEAST_LIMIT, _limit_memory
from kvdoctor.runtime.process import free_memory_limit
import subprocess
_limit_memory(int(sys.argv[1]))
size = LEAST_LIMIT + (1 << 28)
child = subprocess.Popen([sys.executable, "-c", "import numpy; input(); numpy.empty(%d, 'i1')" % size], stdin=-1)
free_memory_limit(child)
child.communicate(b"x\\n")
try:
    numpy.empty(size, "i1")
except MemoryError:
    print("limited", child.returncode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@pytest.mark.parametrize(("most", "said"), [(16, "limited 0\n"), (4096, "")])
def test_the_parent_has_a_limit_of_its_own_and_its_children_have_not(most: int, said: str) -> None:
    assert subprocess.check_output([sys.executable, "-c", LIMITED, str(most)], text=True) == said
