"""The program in JavaScript: its types and its form, its library, and its page in a browser."""

import contextlib
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
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


@contextlib.contextmanager
def served(folder: Path, model: Path, *words: str) -> Iterator[str]:
    """The address that `serve.mjs` prints, for as long as it runs."""
    command = ["node", "serve.mjs", "--model", str(model), "--port", "0", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


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
    with chromium.tab(BROWSER, *SWIFTSHADER) as tab, served(folder, model, "--provider", "webgpu") as address:
        tab.open(address.replace("webgpu", "none"))
        if not tab.evaluate("navigator.gpu?.requestAdapter().then((adapter) => adapter !== null)"):
            pytest.skip("this Chromium has no software adapter of WebGPU")
        yield tab, address


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
    text = tab.evaluate("fetch(document.getElementById('trace').href).then(r => r.text())")
    assert text == (folder / "trace.jsonl").read_text("utf-8")
    assert tab.evaluate(PROVIDER) == "wasm"
    assert tab.evaluate("crossOriginIsolated"), "WebAssembly may have threads"
    found = judged(model, folder / "trace.jsonl")
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
        provider = tab.evaluate(PROVIDER)
    assert state == "good", (said, rows)
    assert re.match(r"webgpu \(google swiftshader, a software adapter\), [1-9]\d* kernels;", provider)
    found = judged(model, folder / "trace.jsonl")
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
        assert not (folder / "trace.jsonl").exists(), "it would pass as one of WebGPU"
        state, said, rows = shown(tab, address)
    assert (state, said) == ("bad", "Not all runs are as expected.")
    assert all(outcome.startswith("error: ") for _, outcome in rows)


class Plain(http.server.SimpleHTTPRequestHandler):
    """Any server that serves files and takes a POST."""

    posted: list[bytes]

    def do_POST(self) -> None:
        self.posted.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.mark.slow
@needs_browser
def test_any_server_will_do(modules: Path, tab: chromium.Tab, tmp_path: Path) -> None:
    """The weights are in a file of their own, and the name of a run is text."""
    model = tmp_path / "a model"
    model.mkdir()
    saved = onnx.load(LLAMA / "model.onnx")
    onnx.save_model(
        saved, model / "model.onnx", save_as_external_data=True, location="weights of it.bin", size_threshold=0
    )
    folder = project(model, modules, tmp_path / "site")
    shutil.copytree(model, folder / "the model")
    runs = (folder / "vectors.json").read_text("utf-8").replace('"one-sequence"', '"<b>one</b>&amp;"')
    (folder / "vectors.json").write_text(runs, "utf-8")
    posted: list[bytes] = []
    handler = partial(type("Handler", (Plain,), {"posted": posted}), directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/index.html"
        state, said, rows = shown(tab, f"{here}?model={quote('the model')}&post=somewhere")
        assert (state, rows[0]) == ("good", ["<b>one</b>&amp;", "as expected"]), said
        assert tab.evaluate("document.querySelector('#runs b')") is None
        assert [b'"run":"<b>one</b>&amp;"' in body for body in posted] == [True]
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
        server.shutdown()


@pytest.mark.slow
def test_the_server_keeps_to_its_folders(modules: Path, tmp_path: Path) -> None:
    folder = project(LLAMA, modules, tmp_path / "loop")

    def answered(path: str, **more: Any) -> int:
        request = urllib.request.Request(base + path, **more)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request) as response:  # noqa: S310
                code: int = response.status
                return code
        except urllib.error.HTTPError as error:
            return error.code

    with served(folder, LLAMA) as address:
        base = address.partition("?")[0]
        assert answered("model/model.onnx") == 200
        for outside in ("..%2f..%2f..%2f..%2fetc%2fpasswd", "model/..%2fgpt2%2fmodel.onnx", "model/%", "model/"):
            assert answered(outside) == 404, outside
        body = {"data": b"{}\n", "method": "POST"}
        assert answered("record", **body, headers={"origin": "http://elsewhere.example"}) == 403
        assert not (folder / "trace.jsonl").exists()
        assert answered("record", **body, headers={"origin": base.rstrip("/")}) == 204
        assert (folder / "trace.jsonl").read_bytes() == b"{}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--most=0",), "--most takes a number, 1 or more, not 0"),
        (("--temperature=nan",), "--temperature takes a number"),
        (("--stop=0x5",), "not integers with commas: 0x5"),
        (("--provider=nonsense",), "there is no provider nonsense; onnxruntime-node has cpu"),
        (("--contract=package.json",), "the contract has schema undefined"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    words: tuple[str, ...], said: str, modules: Path, tmp_path: Path
) -> None:
    folder = project(LLAMA, modules, tmp_path / "loop")
    done = run(folder, "node", "src/main.js", f"--model={LLAMA}", "--prompt=3", *words, code=1)
    assert said in done.stderr
    assert done.stdout == ""
