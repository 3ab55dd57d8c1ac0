"""Execution providers: each in a process of its own, compared with the CPU, never called tested where it was not."""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import text_fixtures
from support.command_line import run

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.choices import CPU
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.diagnose.context import RunContext, extend_context
from kvdoctor.diagnose.examine import build_job
from kvdoctor.diagnose.inspection import build_context
from kvdoctor.diagnose.targets import NEXT, compare_logits
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.providers import PROVIDERS, list_drivers, read_provider
from kvdoctor.runtime.targets import LogitsGap

ROOT = Path(__file__).parents[1]
EXPORTS = ROOT / "fixtures" / "exports"
GPT2, MARIAN = EXPORTS / "gpt2", EXPORTS / "marian-4.57.6"
OTHER = "AzureExecutionProvider"
"""What the wheel for the CPU has as well: it takes every file, and computes nothing."""


@functools.cache
def obstacle(asked: str) -> str:
    """Why a provider cannot be run here; empty if it can."""
    with Runtime(Options().limits) as runtime:
        return runtime.find_provider(asked).error


def needs_webgpu() -> None:
    if reason := obstacle("webgpu"):
        pytest.skip(f"no WebGPU here: {reason}")


def report(*arguments: Any, **environment: str) -> dict[str, Any]:
    done = run(*map(str, arguments), "--format", "json", cwd=ROOT, env=os.environ | environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"exit": done.returncode}


def findings(found: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [one for one in found["findings"] if one["code"] == code]


def test_a_provider_that_computes_nothing_is_not_called_tested_and_the_cpu_alone_is_compared_with_nothing() -> None:
    found = report("step-test", GPT2, "--provider", OTHER)
    assert (found["exit"], found["verdict"]) == (3, "incomplete")
    assert "computes on the CPU alone" in found["targets"][0]["not_run"]["decoder"]
    assert {run["outcome"] for run in found["runs"] if run["experiment"] == "plain-loop"} == {"passed"}
    assert found["arguments"]["provider"] == OTHER
    found = report("step-test", GPT2, "--provider", CPU)
    assert (found["exit"], found["targets"]) == (0, [])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("nowhere/libprovider.so", "there is no library"),
        ("webgpu@no-driver", "no Vulkan driver no-driver"),
        ("cuda", "the package onnxruntime-gpu"),
        ("", "got an empty name"),
    ],
)
def test_a_name_that_means_nothing_is_refused(asked: str, says: str) -> None:
    done = run("step-test", str(GPT2), "--provider", asked, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def libraries(folder: Path) -> dict[str, Path]:
    """Files that are no provider's library: a text, another library, one that ends the process, one that hangs."""
    text, other = folder / "text.so", Path(onnx.__file__).parent / "onnx_cpp2py_export.abi3.so"
    text.write_text("no library", encoding="utf-8")
    found = {"text": text, **({"other": other} if other.is_file() else {})}
    codes = {
        "dies": "void *CreateEpFactories(void) { abort(); }\nvoid *ReleaseEpFactory(void) { return 0; }\n",
        "hangs": "__attribute__((constructor)) static void hang(void) { sleep(600); }\n",
    }
    for name, code in codes.items() if shutil.which("cc") else ():
        source, found[name] = folder / f"{name}.c", folder / f"{name}.so"
        source.write_text(f"#include <stdlib.h>\n#include <unistd.h>\n{code}", encoding="utf-8")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", found[name], source], check=True)
    return found


def test_a_library_that_is_none_is_a_sentence_and_no_pass(tmp_path: Path) -> None:
    says = {
        "text": "does not take its library",
        "other": "does not take its library",
        "dies": "ended by signal SIGABRT",
        "hangs": "stopped at the time limit of 20 s (--timeout) while the provider was loaded",
    }
    for name, library in libraries(tmp_path).items():
        found = report("step-test", GPT2, "--provider", library, "--select", "KV4", "--timeout", 20)
        reason = found["targets"][0]["not_run"]["decoder"]
        assert (found["exit"], found["verdict"]) == (3, "incomplete"), name
        assert says[name] in reason
        assert reason.endswith(NEXT)
        assert "Vulkan" not in reason.removesuffix(NEXT)


def test_a_plugin_that_is_not_installed_names_its_package() -> None:
    absent = next((one for one in PROVIDERS if one.module and read_provider(one.short).is_absent), None)
    if absent is None:
        pytest.skip("every plug-in is installed")
    found = report("step-test", GPT2, "--provider", absent.short)
    assert found["exit"] == 3
    assert absent.install in found["targets"][0]["not_run"]["decoder"]


def test_a_policy_names_providers(tmp_path: Path) -> None:
    (tmp_path / "kvdoctor.toml").write_text(f'providers = ["{OTHER}"]\n', encoding="utf-8")
    (tmp_path / "gpt2").symlink_to(GPT2)
    done = run("gate", "gpt2", "--format", "json", cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["reports"][0]["arguments"]["provider"] == OTHER


def test_one_table_reads_every_name() -> None:
    for known in PROVIDERS:
        assert read_provider(known.short).known == read_provider(known.name).known == known
    assert read_provider(CPU).known is None


@pytest.mark.skipif(sys.platform != "linux", reason="drivers are found by the manifests of Linux")
def test_drivers_are_those_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "lvp_icd.x86_64.json"
    driver.write_text("{}", encoding="utf-8")
    monkeypatch.setenv("VK_DRIVER_FILES", str(driver))
    assert ("lavapipe", driver) in list_drivers()
    assert read_provider("webgpu@lavapipe").drivers == read_provider("webgpu").drivers == [driver]
    assert read_provider("webgpu").environment["VK_ICD_FILENAMES"] == str(driver)


def test_a_run_that_ends_earlier_is_a_difference(tmp_path: Path) -> None:
    folder, options = open_folder(str(GPT2)), Options()
    context = build_context(folder, folder.stacks[0], read_contract(folder.stacks[0], folder.side_cars), options)
    whole, part = tmp_path / "whole.npz", tmp_path / "part.npz"
    with Runtime(options.limits) as runtime:
        job = replace(build_job(context, options), experiments=("plain-loop",), keep_logits=whole)
        (run,) = runtime.examine(job).runs
    with np.load(whole) as kept:
        last = math.prod(run.steps[-1].returned["logits"].shape)
        np.savez(part, **{run.experiment: kept[run.experiment][:-last]})
    tested = replace(extend_context(context, RunContext), runs=(run,))
    shorter = replace(run, steps=run.steps[:-1])
    gaps = compare_logits(tested, [shorter], whole, part, tested.tolerance)
    assert gaps == {run.experiment: LogitsGap(shorter.steps[-1].step, None, "fail")}
    assert compare_logits(tested, [run], part, whole, tested.tolerance) == {}


def test_env_says_how_to_get_what_is_missing() -> None:
    done = run("env", "--format", "json", cwd=ROOT)
    text = " ".join(one["text"] for one in json.loads(done.stdout)["components"])
    assert all(f"{one.short}:" in text for one in PROVIDERS if one.module is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_healthy_exports_are_healthy_on_webgpu(name: str) -> None:
    needs_webgpu()
    found = report("step-test", EXPORTS / name, "--provider", "webgpu")
    assert (found["exit"], found["verdict"], found["findings"]) == (0, "healthy", [])
    (target,) = found["targets"]
    assert target["adapter"]
    assert 1 <= target["tolerance"]["decoder"] / TOLERANCES["float"].passes <= 10
    passed = {(run["provider"], run["experiment"]) for run in found["runs"] if run["outcome"] == "passed"}
    assert passed >= {("WebGpuExecutionProvider", name) for name in ("plain-loop", "chunk", "each-length")}
    assert all((CPU, name) in passed for _, name in passed)


@pytest.mark.slow
def test_a_crash_is_named_and_reproduced(tmp_path: Path) -> None:
    """Marian on its cached branch with a past of length 0: a Softmax over no entries."""
    needs_webgpu()
    out = tmp_path / "repro"
    found = report("repro", MARIAN, "--provider", "webgpu", "--consumer", "held", "-o", out)
    (crash,) = [one for one in findings(found, "KV404") if one["stack"] == "merged"]
    assert "cached-branch-first, step 0, Softmax" in crash["where"]
    assert "has no elements" in " ".join(crash["evidence"])
    died = next(run for run in found["runs"] if run["outcome"] == "died")
    assert (died["location"]["node"]["op"], died["failed_step"]) == ("Softmax", 0)
    assert len(onnx.load(out / "model.onnx").graph.node) < 20
    assert "numpy onnxruntime-ep-webgpu\n" in (out / "README.md").read_text(encoding="utf-8")
    assert "kvdoctor repro MODEL --provider webgpu" in crash["repair"]["text"]


BEFORE = "q0 = MatMul (x0, w_q0)"
ONES = "ones = Constant <value_floats = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]> ()"
FAR = f"big = Constant <value_float = 300.0> ()\n  {ONES}\n  far = Add (x0, big)\n  "
FAULTS = {
    "GroupQueryAttention": ("do_rotary = 1", "do_rotary = 1, softcap = 0.3"),
    "LayerNormalization": (BEFORE, f"{FAR}n0 = LayerNormalization (far, ones)\n  q0 = MatMul (n0, w_q0)"),
    "SkipLayerNormalization": (
        BEFORE,
        f"{FAR}n0 = com.microsoft.SkipLayerNormalization (far, far, ones)\n  q0 = MatMul (n0, w_q0)",
    ),
}
"""What the kernels of WebGPU (0.4.0) compute otherwise: a soft cap, and norms of values far from zero."""


def write_fault(folder: Path, operator: str) -> Path:
    source = ROOT / "fixtures" / "text" / "layout-gqa-growing-healthy.onnxtxt"
    text, (old, new) = source.read_text(encoding="utf-8"), FAULTS[operator]
    assert old in text
    (folder / "changed.onnxtxt").write_text(text.replace(old, new), encoding="utf-8")
    (folder / "model").mkdir()
    text_fixtures.read(folder / "changed.onnxtxt").write(folder / "model")
    return folder / "model"


@pytest.mark.slow
def test_what_two_adapters_agree_in_is_confirmed(tmp_path: Path) -> None:
    usable = [one for name, _ in list_drivers() if not obstacle(one := f"webgpu@{name}")]
    if len(usable) < 2:
        pytest.skip(f"two adapters are needed, and here are {usable or 'none'}")
    found = report("step-test", write_fault(tmp_path, "GroupQueryAttention"), "--provider", ",".join(usable[:2]))
    one, two = ((fault["confidence"], fault["where"]) for fault in findings(found, "KV405"))
    assert (one[0], two[0], " GroupQueryAttention " in one[1] + two[1]) == ("confirmed", "confirmed", True)


@pytest.mark.slow
@pytest.mark.parametrize("operator", FAULTS)
def test_a_fault_of_a_kernel_is_named_with_its_operator(operator: str, tmp_path: Path) -> None:
    needs_webgpu()
    model = write_fault(tmp_path, operator)
    assert report("step-test", model)["findings"] == []
    found = report("step-test", model, "--provider", "webgpu")
    (fault,) = findings(found, "KV405")
    assert f" {operator} " in fault["where"]
    assert fault["confidence"] == ("suspected" if "software" in found["targets"][0]["adapter"] else "confirmed")
