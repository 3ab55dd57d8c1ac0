"""The program in JavaScript: its types and its form, its library, and its page in a browser."""

import contextlib
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import onnx
import pytest
from support import chromium, text_fixtures
from support.isolated import EXPORTS
from support.loop_programs import plan_of, program_text
from support.sampling import first
from test_recorded_runs import essential, judged

from kvdoctor.addons.loops.languages import JAVASCRIPT, LANGUAGES
from kvdoctor.addons.loops.pipeline import LoopRequest, write_loop
from kvdoctor.options import Options

BROWSER = chromium.found()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here (apt-get install chromium)")
SWIFTSHADER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
PROVIDER = "document.getElementById('provider').textContent"
TRACE = "document.getElementById('trace')"
NOTHING = "nothing ran on webgpu: all nodes were computed as WebAssembly"
MARIAN, LLAMA, WHISPER = EXPORTS / "marian-4.57.6", EXPORTS / "llama-gqa", EXPORTS / "whisper"


@pytest.mark.parametrize("name", ["__proto__", "a\0b"])
def test_a_name_that_the_binding_loses_is_refused(name: str) -> None:
    plan = plan_of("llama-gqa")
    refused = replace(plan, decode=replace(plan.decode, outputs=(*plan.decode.outputs, name)))
    assert JAVASCRIPT.refuses(plan) is None
    assert repr(name) in str(JAVASCRIPT.refuses(refused))


def test_an_element_type_that_the_binding_has_not_is_refused() -> None:
    plan = plan_of("llama-gqa")
    slots = tuple(replace(slot, dtype="bfloat16") for slot in plan.slots)
    assert "bfloat16" in str(JAVASCRIPT.refuses(replace(plan, slots=slots)))


def run(folder: Path, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def project(model: Path, modules: Path, out: Path) -> Path:
    """A project as `kvdoctor loop` writes it, with its packages."""
    assert write_loop(LoopRequest(str(model), str(out), "javascript"), Options()).out is not None
    (out / "node_modules").symlink_to(modules / "node_modules")
    (out / "model.path").write_text(str(model), encoding="utf-8")
    return out


@pytest.mark.slow
def test_the_program_is_formatted_and_typed(modules: Path) -> None:
    folder = modules / "program"
    shutil.copytree(LANGUAGES["typescript"].folder, folder)
    run(folder, "../node_modules/.bin/prettier", "--check", "**/*.{js,mjs,json,html,ts}")
    run(folder, "../node_modules/.bin/tsc")
    (folder / "use.ts").write_text(
        'import * as ort from "onnxruntime-node";\n'
        'import { Decoder, type DecodeOptions } from "decode_loop";\n'
        "const options: DecodeOptions = { most: 3, choose: (logits, tokens) => logits.length - tokens.length };\n"
        'const decoder: Decoder = await Decoder.open(ort, "model", {});\n'
        "const rows: number[][] = await decoder.generate([[1]], options);\n"
        "for await (const { token } of decoder.stream(rows)) console.log(token.toFixed());\n",
        encoding="utf-8",
    )
    strict = ("--strict", "--noEmit", "--module", "nodenext", "--target", "es2022", "--types", "node")
    run(folder, "../node_modules/.bin/tsc", "--ignoreConfig", *strict, "use.ts")


@pytest.mark.slow
def test_models_share_a_process_and_calls_that_cannot_be_right_change_nothing(modules: Path, tmp_path: Path) -> None:
    buffer = text_fixtures.load_all()["layout-scatter-static-healthy"].write(tmp_path / "model")
    folders = [project(model, modules, tmp_path / f"loop-{model.name}") for model in (MARIAN, LLAMA, buffer)]
    (folders[0] / "calls.mjs").write_text(program_text("calls.mjs"), encoding="utf-8")
    done = run(folders[0], "node", "calls.mjs", *map(str, folders))
    assert json.loads(done.stdout) == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def served(folder: Path, model: Path, provider: str = "wasm") -> Iterator[str]:
    """The address of the page, on a plain server of files; the model is a folder in it."""
    if not (folder / "model").exists():
        (folder / "model").symlink_to(model)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index.html?provider={provider}"
        finally:
            server.shutdown()


def shown(tab: chromium.Tab, address: str, seconds: float = 120) -> tuple[str, str, list[list[str]]]:
    """The state of the page when it has ended, what it says, and the rows of its table."""
    tab.open(address)
    end = time.monotonic() + seconds
    while (state := tab.evaluate("document.getElementById('status').dataset.state ?? 'busy'")) == "busy":
        assert time.monotonic() < end, tab.evaluate("document.body.innerText")
        time.sleep(0.1)
    rows = "[...document.querySelectorAll('#runs tr')].map(r => [...r.cells].map(c => c.textContent))"
    return state, tab.evaluate("document.getElementById('status').textContent"), tab.evaluate(rows)


@contextlib.contextmanager
def on_webgpu(folder: Path, model: Path) -> Iterator[tuple[chromium.Tab, str]]:
    """A browser with a software adapter, and the address of the page for WebGPU."""
    assert BROWSER is not None
    with chromium.tab(BROWSER, *SWIFTSHADER) as tab, served(folder, model, "webgpu") as address:
        tab.open(address.replace("webgpu", "none"))
        if not tab.evaluate("navigator.gpu?.requestAdapter().then((adapter) => adapter !== null)"):
            pytest.skip("this Chromium has no software adapter of WebGPU")
        yield tab, address


def offered(tab: chromium.Tab, folder: Path) -> Path:
    """The trace that the page offers, as a file."""
    (folder / "trace.jsonl").write_text(tab.evaluate(f"fetch({TRACE}.href).then(r => r.text())"), encoding="utf-8")
    return folder / "trace.jsonl"


def names(folder: Path) -> list[str]:
    return [run["name"] for run in json.loads((folder / "vectors.json").read_text("utf-8"))["runs"]]


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    assert BROWSER is not None
    with chromium.tab(BROWSER) as opened:
        yield opened


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("model", [MARIAN, LLAMA, WHISPER], ids=["marian", "llama", "whisper"])
def test_the_runs_in_a_browser_are_as_expected(model: Path, modules: Path, tab: chromium.Tab, tmp_path: Path) -> None:
    folder = project(model, modules, tmp_path / "loop")
    with served(folder, model) as address:
        state, said, rows = shown(tab, address)
    assert (state, rows) == ("good", [[name, "as expected"] for name in names(folder)]), said
    loud = [event for event in tab.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert not loud, loud
    assert tab.evaluate(PROVIDER) == "wasm"
    found = judged(model, offered(tab, folder))
    assert (found.findings, essential(found)) == ((), [])


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("model", "outputs"), first([(LLAMA, "gpu-buffer"), (MARIAN, "cpu")], 1), ids=["llama-gpu-buffer", "marian-cpu"]
)
def test_webgpu_is_used_where_there_is_some(model: Path, outputs: str, modules: Path, tmp_path: Path) -> None:
    folder = project(model, modules, tmp_path / "loop")
    with on_webgpu(folder, model) as (tab, address):
        state, said, rows = shown(tab, f"{address}&outputs={outputs}", 300)
        provider, trace = tab.evaluate(PROVIDER), offered(tab, folder)
    assert state == "good", (said, rows)
    assert re.match(r"webgpu \(google swiftshader, a software adapter\), [1-9]\d* kernels;", provider)
    found = judged(model, trace)
    assert not essential(found)
    assert {finding.severity for finding in found.findings} <= {"warning", "note"}, "it may round otherwise"


@pytest.mark.slow
@needs_browser
def test_webassembly_is_never_passed_as_webgpu(modules: Path, tab: chromium.Tab, tmp_path: Path) -> None:
    """Of a model that computes in double, the runtime gives WebGPU nothing; without an adapter it opens none."""
    model = text_fixtures.load_all()["layout-double-inside-healthy"].write(tmp_path / "model")
    folder = project(model, modules, tmp_path / "loop")
    with on_webgpu(folder, model) as (with_adapter, address):
        assert shown(with_adapter, address, 300)[:2] == ("bad", NOTHING)
        assert with_adapter.evaluate(f"{TRACE}.hidden"), "it would pass as one of WebGPU"
        state, said, rows = shown(tab, address)
    assert (state, said) == ("bad", "Not all runs are as expected.")
    assert all(outcome.startswith("error: ") for _, outcome in rows)


@pytest.mark.slow
@needs_browser
def test_what_the_page_reads_may_be_anything(modules: Path, tab: chromium.Tab, tmp_path: Path) -> None:
    """The weights are in a file of their own, and the name of a run is text."""
    model = tmp_path / "a model"
    model.mkdir()
    saved = onnx.load(LLAMA / "model.onnx")
    onnx.save_model(
        saved, model / "model.onnx", save_as_external_data=True, location="weights of it.bin", size_threshold=0
    )
    folder = project(model, modules, tmp_path / "site")
    (folder / "the model").symlink_to(model)
    runs = (folder / "vectors.json").read_text("utf-8").replace('"one-sequence"', '"<b>one</b>&amp;"')
    (folder / "vectors.json").write_text(runs, "utf-8")
    with served(folder, model) as address:
        here = address.partition("?")[0]
        state, said, rows = shown(tab, f"{here}?model={quote('the model')}")
        assert (state, rows[0]) == ("good", ["<b>one</b>&amp;", "as expected"]), said
        assert tab.evaluate("document.querySelector('#runs b')") is None
        assert '"run":"<b>one</b>&amp;"' in offered(tab, folder).read_text("utf-8")
        assert shown(tab, f"{here}?provider=cuda")[:2] == (
            "bad",
            "there is no provider cuda; a browser has wasm, webgpu, webnn",
        )
        assert shown(tab, f"{here}?model=elsewhere")[2][0][1].startswith("error: ")
        (folder / "vectors.json").unlink()
        assert shown(tab, here)[1].startswith("vectors.json: 404")
        (folder / "node_modules").unlink()
        again = shown(tab, here.replace("127.0.0.1", "localhost"))  # nothing of that address is cached
        assert "npm install onnxruntime-web" in again[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--calls=5",), "is not iterable"),
        (("--provider=nonsense",), "there is no provider nonsense; onnxruntime-node has cpu"),
        (("--contract=package.json", "--calls=[]"), "the contract has schema undefined"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    words: tuple[str, ...], said: str, modules: Path, tmp_path: Path
) -> None:
    folder = project(LLAMA, modules, tmp_path / "loop")
    done = run(folder, "node", "src/main.js", f"--model={LLAMA}", *words, code=1)
    assert said in done.stderr
    assert done.stdout == ""
