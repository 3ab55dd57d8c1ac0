"""The programs in JavaScript and TypeScript as they run: probes in Node and in a browser, and what is refused."""

import contextlib
import http.server
import json
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

import numpy as np
import onnxruntime as ort
import pytest
from support import chromium, text_fixtures
from support.isolated import EXPORTS, kvdoctor
from support.loop_programs import assert_decodes
from support.sampling import first

pytestmark = pytest.mark.slow

BROWSER = chromium.found()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here (apt-get install chromium)")
SWIFTSHADER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
MARIAN, LLAMA, WHISPER = EXPORTS / "marian-4.57.6", EXPORTS / "llama-gqa", EXPORTS / "whisper"
EMBEDDINGS = {
    "layout-embed-tokens-healthy": ("embed_tokens.onnx", "decoder_model_merged.onnx", ("inputs_embeds",)),
    "layout-embedding-image-healthy": ("embedding.onnx", "model.onnx", ("inputs_embeds",)),
    "layout-per-layer-embeddings-healthy": (
        "embed_tokens.onnx",
        "decoder_model_merged.onnx",
        ("inputs_embeds", "per_layer_inputs"),
    ),
}
"""Decoders that take embeddings: the graph that makes these, the decoder, and what it takes."""
NEWEST = {MARIAN: "present.1.decoder.key", LLAMA: "present.1.key"}
"""One tensor of the cache, whose axis 2 counts the tokens."""


class Projects:
    """Projects as `kvdoctor loop` and `kvdoctor probe` write them, each made once, built, with its packages."""

    def __init__(self, modules: Path, folder: Path) -> None:
        self._modules, self._folder = modules, folder

    def make(self, command: str, language: str, model: Path) -> Path:
        out = self._folder / f"{command}-{language}-{model.name}"
        if out.exists():
            return out
        done = kvdoctor(command, model, "--language", language, "-o", out)
        assert done.returncode == 0, done.stdout + done.stderr
        (out / "node_modules").symlink_to(self._modules / "node_modules")
        if language == "typescript":
            node(out, str(self._modules / "node_modules" / "typescript" / "bin" / "tsc"))
        return out

    def copy(self, project: Path, out: Path) -> Path:
        """A copy of a project, to change it."""
        shutil.copytree(project, out, symlinks=True)
        return out


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that takes embeddings, and the graph that makes them, of the features of images as well."""
    name = "layout-embedding-image-healthy"
    return text_fixtures.load_all()[name].write(tmp_path_factory.mktemp("image") / name)


@pytest.fixture(scope="module")
def projects(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Projects:
    return Projects(modules, tmp_path_factory.mktemp("projects"))


def node(folder: Path, *words: str, code: int = 0, trace: Path | None = None) -> "subprocess.CompletedProcess[str]":
    environment = None if trace is None else {"PATH": "/usr/bin:/bin", "KVDOCTOR_TRACE": str(trace)}
    done = subprocess.run(["node", *words], cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def made_runs(project: Path, model: Path, language: str, code: int = 0) -> tuple[list[str], Path]:
    """What the program of a probe prints, and its result."""
    main = "dist/main.js" if language == "typescript" else "main.js"
    done = node(project, main, "--model", str(model), "--probe", "probe.txt", code=code)
    return done.stdout.splitlines(), project / "result.jsonl"


def names(project: Path) -> list[str]:
    return [line.split()[1] for line in (project / "probe.txt").read_text("utf-8").splitlines()]


def judged(model: Path, result: Path) -> tuple[int, dict[str, Any]]:
    done = kvdoctor("judge", model, result, "--format", "json")
    return done.returncode, json.loads(done.stdout)


def assert_judged_right(model: Path, result: Path) -> None:
    code, report = judged(model, result)
    assert (code, report["findings"], report["not_checked"]) == (0, [], [])
    assert all(step["difference"] is not None for run in report["runs"] for step in run["steps"])


@pytest.mark.parametrize(
    ("language", "model"),
    [("javascript", MARIAN), ("javascript", WHISPER), ("typescript", LLAMA)],
    ids=["javascript-marian", "javascript-whisper", "typescript-llama"],
)
def test_a_probe_in_node_is_as_expected(language: str, model: Path, projects: Projects) -> None:
    project = projects.make("probe", language, model)
    printed, result = made_runs(project, model, language)
    assert printed == [f"{name}: as expected" for name in names(project)]
    assert_judged_right(model, result)


def test_a_probe_of_float16_is_as_expected(projects: Projects, tmp_path: Path) -> None:
    model = text_fixtures.load_all()["decoder-only-half-cache-healthy"].write(tmp_path / "half")
    project = projects.make("probe", "javascript", model)
    _, result = made_runs(project, model, "javascript")
    assert "float16" in result.read_text("utf-8")
    assert_judged_right(model, result)


@pytest.mark.parametrize("language", ["javascript", "typescript"])
def test_a_probe_of_an_embedding_graph_is_as_expected(language: str, projects: Projects, image: Path) -> None:
    project = projects.make("probe", language, image)
    printed, result = made_runs(project, image, language)
    assert printed == [f"{name}: as expected" for name in names(project)]
    assert_judged_right(image, result)


def test_a_probe_of_embeddings_of_float16_is_as_expected(projects: Projects, tmp_path: Path) -> None:
    usual = text_fixtures.load_all()["layout-embed-tokens-healthy"]
    wide, half = (
        "float[batch_size, sequence_length, 8] inputs_embeds",
        "float16[batch_size, sequence_length, 8] inputs_embeds",
    )
    changes = (
        (wide, half),
        (
            "inputs_embeds = Gather (w_tokens, input_ids)",
            "e = Gather (w_tokens, input_ids) inputs_embeds = Cast <to = 10> (e)",
        ),
        ("x0 = Add (inputs_embeds, places)", "e = Cast <to = 1> (inputs_embeds) x0 = Add (e, places)"),
    )
    files = dict(usual.files)
    for old, new in changes:
        assert any(old in text for text in files.values())
        files = {name: text.replace(old, new) for name, text in files.items()}
    model = replace(usual, files=files).write(tmp_path / "half-embeddings")
    project = projects.make("probe", "javascript", model)
    _, result = made_runs(project, model, "javascript")
    embed = lines(result)[0]
    assert (embed["file"], embed["got"]["inputs_embeds"]["dtype"]) == ("embed_tokens.onnx", "float16")
    assert_judged_right(model, result)


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("language", ["javascript", "typescript"])
def test_a_decoder_that_takes_embeddings_is_decoded(language: str, name: str, tmp_path: Path) -> None:
    assert_decodes(language, text_fixtures.load_all()[name].write(tmp_path))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_decoder_gets_the_embeddings_of_the_graph_beside_it(name: str, projects: Projects, tmp_path: Path) -> None:
    """Each call of the decoder is fed what the embedding graph returned just before it."""
    model, trace = text_fixtures.load_all()[name].write(tmp_path / name), tmp_path / "loop.jsonl"
    project = projects.make("loop", "javascript", model)
    words = ("--prompt", "5,6,7", "--prompt", "8,9", "--follow", "9,4,2", "--follow", "1,2,3")
    node(project, "main.js", "--model", str(model), *words, trace=trace)
    calls, (embedding, decoder, taken) = lines(trace), EMBEDDINGS[name]
    assert [call["file"] for call in calls] == [embedding, decoder] * 4
    for embed, decode in zip(calls[::2], calls[1::2], strict=True):
        assert embed["fed"]["input_ids"]["shape"] == decode["fed"]["inputs_embeds"]["shape"][:2]
        assert {one: decode["fed"][one] for one in taken} == embed["got"]
    done = kvdoctor("step-test", model, "--consumer", "held", "--trace", trace, "--format", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["findings"]) == (0, [])
    assert any("4 steps of" in note and "none breaks it" in note for note in report["notes"])


def test_there_are_no_features_without_an_image(projects: Projects, image: Path, tmp_path: Path) -> None:
    project, trace = projects.make("loop", "javascript", image), tmp_path / "loop.jsonl"
    node(project, "main.js", "--model", str(image), "--prompt", "5,6", "--most", "1", trace=trace)
    assert lines(trace)[0]["fed"]["image_features"] == {"dtype": "float32", "shape": [0, 8], "data": []}


DISPOSED = """
import { InferenceSession } from "onnxruntime-node";
import { Decoder } from "./loop.js";

const create = InferenceSession.create.bind(InferenceSession);
const embedded = [];
let broken = false;
InferenceSession.create = async (path, options) => {
  const session = await create(path, options);
  const run = session.run.bind(session);
  session.run = async (...given) => {
    if (!path.endsWith("embedding.onnx")) {
      if (broken) throw new Error("broken");
      return run(...given);
    }
    const got = await run(...given);
    embedded.push(...Object.values(got));
    return got;
  };
  return session;
};
const decoder = await Decoder.open(process.argv[2]);
await decoder.prefill([[5, 6]]);
await decoder.step([[7]]);
broken = true;
const said = await decoder.step([[7]]).catch((error) => error.message);
console.log(JSON.stringify([said, embedded.map((value) => value.location), decoder.length]));
"""


def test_embeddings_are_disposed_of_after_each_call_and_after_one_that_fails(projects: Projects, image: Path) -> None:
    project = projects.make("loop", "javascript", image)
    (project / "disposed.mjs").write_text(DISPOSED, encoding="utf-8")
    said = json.loads(node(project, "disposed.mjs", str(image)).stdout)
    assert said == ["broken", ["none", "none", "none"], 3]


def test_samples_are_the_values_at_their_places(projects: Projects) -> None:
    project = projects.make("probe", "javascript", MARIAN)
    _, result = made_runs(project, MARIAN, "javascript")
    line = json.loads(result.read_text("utf-8").splitlines()[0])
    assert list(line) == ["run", "file", "fed", "got", "error"]
    feeds = {name: np.array(one["data"]).reshape(one["shape"]) for name, one in line["fed"].items()}
    (states,) = ort.InferenceSession(MARIAN / line["file"]).run(["last_hidden_state"], feeds)
    (entry,) = line["got"].values()
    flat = np.asarray(states).ravel()
    assert flat.size > 64
    assert "data" not in entry
    assert np.allclose(entry["sample"], [flat[k * (flat.size - 1) // 63] for k in range(64)], atol=1e-5)


WRONG = """
export * from {real};
import { InferenceSession as Real, Tensor } from {real};

const NAME = {name};

// A runtime that loses the newest entry of one part of the cache.
function wrong(value) {
  const [batch, heads, length, width] = value.dims;
  const left = length - 1;
  if (left === 0) {
    return value;
  }
  const data = Array.from(value.data);
  if ("{how}" === "zeroes") {
    return new Tensor(value.type, data.map((n, i) => (Math.floor(i / width) % length === left ? 0 : n)), value.dims);
  }
  const kept = data.filter((_, i) => Math.floor(i / width) % length !== left);
  return new Tensor(value.type, kept, [batch, heads, left, width]);
}

export const InferenceSession = {
  async create(...given) {
    const session = await Real.create(...given);
    return {
      release: () => session.release(),
      async run(...fed) {
        const got = await session.run(...fed);
        return NAME in got ? { ...got, [NAME]: wrong(got[NAME]) } : got;
      },
    };
  },
};
"""


def wrapped(real: str, name: str, how: str) -> str:
    text = WRONG.replace("{real}", json.dumps(real)).replace("{name}", json.dumps(name))
    return text.replace("{how}", how)


def assert_found(model: Path, result: Path) -> None:
    code, report = judged(model, result)
    assert code == 1
    assert "KV420" in {finding["code"] for finding in report["findings"]}
    assert any(NEWEST[model] in json.dumps(finding) for finding in report["findings"])


@pytest.mark.parametrize("model", NEWEST, ids=["marian", "llama"])
@pytest.mark.parametrize("how", ["zeroes", "truncates"])
def test_a_wrong_runtime_shows_in_node(
    how: str, model: Path, projects: Projects, modules: Path, tmp_path: Path
) -> None:
    project = projects.copy(projects.make("probe", "javascript", model), tmp_path / "probe")
    (project / "node_modules").unlink()
    package = project / "node_modules" / "onnxruntime-node"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"type": "module", "exports": "./index.js"}', encoding="utf-8")
    real = (modules / "node_modules" / "onnxruntime-node" / "dist" / "index.js").as_uri()
    (package / "index.js").write_text(wrapped(real, NEWEST[model], how), encoding="utf-8")
    printed, result = made_runs(project, model, "javascript", code=1)
    assert printed[0].startswith("one-sequence: sequence 0, step " if how == "zeroes" else "one-sequence: ")
    assert "one-sequence: as expected" not in printed
    assert [line.partition(":")[0] for line in printed] == names(project), "a run that fails does not stop the next"
    if how == "zeroes":
        assert_found(model, result)
    else:
        shapes = [line["got"][NEWEST[model]]["shape"][2] for line in lines(result) if NEWEST[model] in line["got"]]
        assert shapes[0] == lines(result)[1 if model == MARIAN else 0]["fed"]["input_ids"]["shape"][1] - 1


def lines(result: Path) -> list[dict[str, Any]]:
    """The calls in a result."""
    read = [json.loads(line) for line in result.read_text("utf-8").splitlines()]
    return [line for line in read if "fed" in line]


@contextlib.contextmanager
def served(project: Path, model: Path, *words: str) -> Iterator[str]:
    """The address that `serve.mjs` prints, for as long as it runs."""
    command = ["node", "serve.mjs", "--model", str(model), "--port", "0", "--result", "web.jsonl", *words]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def shown(tab: chromium.Tab, address: str, seconds: float = 120) -> tuple[str, list[list[str]]]:
    """The state of the page when it has ended, and the rows of its table."""
    tab.open(address)
    end = time.monotonic() + seconds
    while (state := tab.evaluate("document.getElementById('status').dataset.state ?? 'busy'")) == "busy":
        assert time.monotonic() < end, tab.evaluate("document.body.innerText")
        time.sleep(0.1)
    rows = "[...document.querySelectorAll('#runs tr')].map(r => [...r.cells].map(c => c.textContent))"
    return state, tab.evaluate(rows)


def status(tab: chromium.Tab) -> str:
    text: str = tab.evaluate("document.getElementById('status').textContent")
    return text


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    assert BROWSER is not None
    with chromium.tab(BROWSER) as opened:
        yield opened


@needs_browser
@pytest.mark.parametrize(
    ("language", "model"),
    [("javascript", MARIAN), ("typescript", LLAMA), ("javascript", WHISPER)],
    ids=["javascript-marian", "typescript-llama", "javascript-whisper"],
)
def test_a_probe_in_a_browser_is_as_expected(language: str, model: Path, projects: Projects, tab: chromium.Tab) -> None:
    project = projects.make("probe", language, model)
    with served(project, model) as address:
        state, rows = shown(tab, address)
    assert (state, rows) == ("good", [[name, "as expected"] for name in names(project)]), status(tab)
    loud = [event for event in tab.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert not loud, loud
    result = project / "web.jsonl"
    offered = "document.getElementById('result')"
    text = tab.evaluate(f"fetch({offered}.href).then(r => r.text())")
    assert text == result.read_text("utf-8")
    assert tab.evaluate(f"[{offered}.download, {offered}.hidden]") == ["result.jsonl", False]
    assert tab.evaluate("crossOriginIsolated"), "WebAssembly may have threads"
    assert_judged_right(model, result)


@needs_browser
def test_a_probe_of_an_embedding_graph_in_a_browser_is_as_expected(
    projects: Projects, tab: chromium.Tab, image: Path
) -> None:
    project = projects.make("probe", "javascript", image)
    with served(project, image) as address:
        state, rows = shown(tab, address)
    assert (state, rows) == ("good", [[name, "as expected"] for name in names(project)]), status(tab)
    assert [line["file"] for line in lines(project / "web.jsonl")[:2]] == ["embedding.onnx", "model.onnx"]
    assert_judged_right(image, project / "web.jsonl")


@needs_browser
@pytest.mark.parametrize("model", NEWEST, ids=["marian", "llama"])
def test_a_wrong_runtime_shows_in_a_browser(model: Path, projects: Projects, tab: chromium.Tab, tmp_path: Path) -> None:
    project = projects.copy(projects.make("probe", "javascript", model), tmp_path / "probe")
    page, real = (project / "index.html").read_text("utf-8"), "./node_modules/onnxruntime-web/dist/ort.all.min.mjs"
    assert page.count(real) == 1
    (project / "index.html").write_text(page.replace(real, "./wrong.mjs"), encoding="utf-8")
    (project / "wrong.mjs").write_text(wrapped(real, NEWEST[model], "zeroes"), encoding="utf-8")
    with served(project, model) as address:
        state, rows = shown(tab, address)
    assert state == "bad"
    assert rows[0][1].startswith("sequence 0, step ")
    assert_found(model, project / "web.jsonl")


def assert_runs_with_webgpu(model: Path, outputs: str, projects: Projects) -> None:
    """The software adapter of Chromium stands for a graphics card."""
    assert BROWSER is not None
    project = projects.make("probe", "javascript", model)
    with chromium.tab(BROWSER, *SWIFTSHADER) as tab, served(project, model, "--provider", "webgpu") as address:
        tab.open(address.replace("webgpu", "none"))
        if not tab.evaluate("navigator.gpu?.requestAdapter().then((adapter) => adapter !== null)"):
            pytest.skip("this Chromium has no software adapter of WebGPU")
        state, rows = shown(tab, f"{address}&outputs={outputs}", 300)
        provider = tab.evaluate("document.getElementById('provider').textContent")
    assert (state, provider) == ("good", "webgpu"), rows
    code, report = judged(model, project / "web.jsonl")
    severities = {finding["severity"] for finding in report["findings"]}
    assert (code, severities <= {"warning", "note"}) == (0, True), "it may round otherwise than the CPU"


@needs_browser
@pytest.mark.parametrize(
    ("model", "outputs"),
    first([(MARIAN, "cpu"), (LLAMA, "gpu-buffer"), (MARIAN, "gpu-buffer"), (LLAMA, "cpu")], 2),
    ids=["marian-cpu", "llama-gpu-buffer", "marian-gpu-buffer", "llama-cpu"],
)
def test_webgpu_is_used_where_there_is_some(model: Path, outputs: str, projects: Projects) -> None:
    assert_runs_with_webgpu(model, outputs, projects)


def with_embeddings_apart(model: Path, out: Path) -> Path:
    """A model whose embedding of tokens is in a graph of its own, as transformers.js has it."""
    import onnx

    decoder, embedding = onnx.load(model), onnx.load(model)
    (gather,) = (node for node in decoder.graph.node if "input_ids" in node.input)
    (table,) = (weight for weight in decoder.graph.initializer if weight.name == gather.input[0])
    (ids,) = (one for one in decoder.graph.input if one.name == "input_ids")
    dims = ["batch_size", "sequence_length", table.dims[1]]
    made = onnx.helper.make_tensor_value_info("inputs_embeds", table.data_type, dims)
    node = onnx.helper.make_node("Gather", [table.name, "input_ids"], ["inputs_embeds"])
    embedding.graph.CopyFrom(onnx.helper.make_graph([node], "embedding", [ids], [made], [table]))
    for one in decoder.graph.node:
        one.input[:] = ["inputs_embeds" if name == gather.output[0] else name for name in one.input]
    decoder.graph.node.remove(gather)
    decoder.graph.input.remove(ids)
    decoder.graph.input.append(made)
    out.mkdir()
    onnx.save_model(embedding, out / "embed_tokens.onnx")
    onnx.save_model(decoder, out / "decoder_model_merged.onnx")
    return out


@needs_browser
def test_embeddings_go_from_graph_to_graph_with_webgpu(projects: Projects, tmp_path: Path) -> None:
    model = with_embeddings_apart(LLAMA / "model.onnx", tmp_path / "embeddings-apart")
    assert_runs_with_webgpu(model, "gpu-buffer", projects)


class Plain(http.server.SimpleHTTPRequestHandler):
    """Any server that serves files and takes a POST."""

    posted: list[bytes]

    def do_POST(self) -> None:
        self.posted.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@needs_browser
def test_any_server_will_do(projects: Projects, tab: chromium.Tab, tmp_path: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    graph = onnx_with_weights_beside(LLAMA / "model.onnx", model / "model.onnx")
    assert (model / graph).is_file()
    project = projects.make("probe", "javascript", model)
    copied = projects.copy(project, tmp_path / "site")
    shutil.copytree(model, copied / "the model")
    (copied / "probe.txt").write_text(
        (copied / "probe.txt").read_text("utf-8").replace("--run one-sequence ", "--run <b>one</b>&amp; "), "utf-8"
    )
    posted: list[bytes] = []
    handler = type("Handler", (Plain,), {"posted": posted})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(copied))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/index.html"
        state, rows = shown(tab, f"{here}?model={quote('the model')}&post=somewhere")
        assert (state, rows[0]) == ("good", ["<b>one</b>&amp;", "as expected"]), "text is shown, not interpreted"
        assert tab.evaluate("document.querySelector('#runs b')") is None
        assert [b'"run":"<b>one</b>&amp;"' in body for body in posted] == [True]
        assert shown(tab, f"{here}?provider=cuda")[0] == "bad"
        assert status(tab) == "there is no provider cuda; a browser has wasm, webgpu, webnn"
        state, rows = shown(tab, f"{here}?model=elsewhere")
        assert state == "bad"
        assert rows[0][1].startswith("error: ")
        (copied / "probe.txt").unlink()
        assert shown(tab, here)[0] == "bad"
        assert status(tab).startswith("probe.txt: 404")
        (copied / "node_modules").unlink()
        assert shown(tab, here.replace("127.0.0.1", "localhost"))[0] == "bad"  # nothing of that address is cached
        assert "was not loaded" in status(tab)
        server.shutdown()


def onnx_with_weights_beside(model: Path, out: Path) -> str:
    """Save a model with its weights in another file, and return its name."""
    import onnx

    name = "weights of it.bin"
    onnx.save_model(onnx.load(model), out, save_as_external_data=True, location=name, size_threshold=0)
    return name


def test_the_server_keeps_to_its_folders(projects: Projects) -> None:
    project = projects.make("probe", "javascript", LLAMA)

    def answered(path: str, **more: Any) -> int:
        request = urllib.request.Request(base + path, **more)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request) as response:  # noqa: S310
                code: int = response.status
                return code
        except urllib.error.HTTPError as error:
            return error.code

    with served(project, LLAMA) as address:
        base = address.partition("?")[0]
        assert answered("model/model.onnx") == 200
        for outside in ("..%2f..%2f..%2f..%2fetc%2fpasswd", "model/..%2fgpt2%2fmodel.onnx", "model/%", "model/"):
            assert answered(outside) == 404, outside
        body = {"data": b"{}\n", "method": "POST"}
        assert answered("result", **body, headers={"origin": "http://elsewhere.example"}) == 403
        assert not (project / "web.jsonl").exists() or (project / "web.jsonl").read_bytes() != b"{}\n"
        assert answered("result", **body, headers={"origin": base.rstrip("/")}) == 204
        assert (project / "web.jsonl").read_bytes() == b"{}\n"


REFUSED = """
import {{ Decoder }} from "./loop.js";
const decoder = await Decoder.open(process.argv[2]);
const said = [];
for (const call of [{calls}]) {{
  try {{
    await call();
    said.push(null);
  }} catch (error) {{
    said.push(error.message);
  }}
}}
console.log(JSON.stringify(said));
"""

OF_MARIAN = [
    ("decoder.prefill([[1]])", "begin with encode()"),
    ("decoder.encode([])", "the source: give rows of the same length, at least 1"),
    ("decoder.encode([[5, 6], [5]])", "the source: give rows of the same length, at least 1"),
    ("decoder.encode([[5, 0.5]])", "the ids of the source are whole numbers"),
    ("decoder.encode([[5, -1]])", "the ids of the source are whole numbers, 0 or more"),
    ("decoder.encode([[5, 6]], [[1]])", "the mask has shape [1,2]; got [1,1]"),
    ("decoder.encode([[5, 6]], [[1, 1]])", None),
    ("decoder.step([[1]])", "begin with prefill()"),
    ("decoder.rewind(5)", "cannot forget 5 of 0 tokens"),
    ("decoder.prefill([])", "every sequence begins with at least one token"),
    ("decoder.prefill([[]])", "every sequence begins with at least one token"),
    ("decoder.prefill([[1], [1]])", "2 prompts for 1 sources"),
    ("decoder.encode([[5, 6], [5, 6]])", None),
    ("decoder.prefill([[1], [1, 2]])", "the prompts of a batch must have the same length"),
    ("decoder.encode([[5, 6]])", None),
    ("decoder.prefill([[-1]])", "token ids are 0 to 127"),
    ("decoder.prefill([[128]])", "token ids are 0 to 127"),
    ("decoder.prefill([[1.5]])", "token ids are 0 to 127"),
    ("decoder.prefill([[1]])", None),
    ("decoder.step([[1], [2]])", "a step takes tokens of each of 1 sequences"),
    ("decoder.step([[]])", "the tokens of a step: give rows of the same length, at least 1"),
    ("decoder.step([[128]])", "token ids are 0 to 127"),
    ("decoder.step([Array(64).fill(1)])", "a sequence has at most 64 tokens here"),
    ("decoder.rewind(1)", "cannot forget 1 of 1 tokens"),
    ("decoder.reorder([1])", "there are 1 sequences, not all of: 1"),
    ("decoder.reorder([0, 0])", None),
    ("decoder.step([[1], [2]])", None),
    ("decoder.prefill([[1]])", "begin with encode(), and again after reorder()"),
    ("decoder.encode([[5, 6]])", None),
    ("decoder.generate([[1]], { most: 0 })", "most is 1 or more; got 0"),
    ("decoder.generate([[1]], { most: NaN })", "most is 1 or more; got NaN"),
    ("Promise.all([decoder.prefill([[1]]), decoder.step([[1]])])", "another call of this decoder is under way"),
    ("decoder.prefill([[1]])", None),
    ("Promise.all([decoder.step([[1]]), decoder.rewind(0)])", "another call of this decoder is under way"),
    ("Promise.all([decoder.generate([[1]]), decoder.encode([[1]])])", "another call of this decoder is under way"),
    ("Promise.all([decoder.generate([[1]]), Promise.resolve().then(() => decoder.reset())])", "another call of this"),
]
OF_A_BUFFER = [
    ("Decoder.open(process.argv[2], { capacity: 0 })", "the capacity is a whole number above 0; got 0"),
    ("Decoder.open(process.argv[2], { capacity: 1.5 })", "the capacity is a whole number above 0; got 1.5"),
]


def said(project: Path, model: Path, calls: list[str]) -> list[str | None]:
    """What each call throws, one after the other on one decoder."""
    pause = "await new Promise((done) => setTimeout(done, 50))"
    listed = ",\n".join(f"async () => {{ try {{ await {call}; }} finally {{ {pause}; }} }}" for call in calls)
    (project / "refused.mjs").write_text(REFUSED.format(calls=listed), encoding="utf-8")
    messages: list[str | None] = json.loads(node(project, "refused.mjs", str(model)).stdout)
    return messages


@pytest.mark.parametrize("calls", [OF_MARIAN, OF_A_BUFFER], ids=["marian", "buffer"])
def test_calls_that_cannot_be_right_are_refused(
    calls: list[tuple[str, str | None]], projects: Projects, tmp_path: Path
) -> None:
    buffer = "layout-scatter-static-healthy"
    model = MARIAN if calls is OF_MARIAN else text_fixtures.load_all()[buffer].write(tmp_path / buffer)
    project = projects.make("loop", "javascript", model)
    messages = said(project, model, [call for call, _ in calls])
    for (call, expected), got in zip(calls, messages, strict=True):
        assert (got is None) == (expected is None), (call, got)
        assert (expected or "") in (got or ""), (call, got)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--most", "0"), "--most takes a whole number above 0"),
        (("--top-k", "0"), "--top-k takes a whole number above 0"),
        (("--temperature", "-1"), "--temperature is 0 or more"),
        (("--temperature", "nan"), "--temperature takes a number"),
        (("--self-test", "rewind"), "--self-test needs tokens to --follow"),
        (("--follow", "5", "--self-test", "sideways"), "--self-test knows rewind and reorder, not sideways"),
        (("--probe", "README.md", "--result", "./README.md"), "--result is the file of --probe itself"),
        (("--follow", "5.0"), "not integers with commas: 5.0"),
        (("--follow", "0x5"), "not integers with commas: 0x5"),
        (("--provider", "nonsense"), "there is no provider nonsense; onnxruntime-node has cpu"),
        (("--source", ""), "give rows of the same length, at least 1"),
    ],
)
def test_options_that_cannot_be_right_are_refused(words: tuple[str, ...], told: str, projects: Projects) -> None:
    project = projects.make("loop", "javascript", MARIAN)
    source = () if "--source" in words else ("--source", "5,6")
    done = node(project, "main.js", f"--model={MARIAN}", "--prompt", "3", *source, *joined(words), code=1)
    assert told in done.stderr
    assert done.stdout == ""


def joined(words: tuple[str, ...]) -> list[str]:
    """Options with their values behind `=`: one may begin with a minus sign."""
    return [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]


def decoded(project: Path, *words: str) -> list[str]:
    return node(project, "main.js", "--model", str(MARIAN), *words).stdout.splitlines()


def test_sources_of_unequal_length_are_padded_and_masked(projects: Projects) -> None:
    project = projects.make("loop", "javascript", MARIAN)
    long, short = ("--source", "62,64,80,92,34,41,84"), ("--source", "92,47,84")
    both = decoded(project, "--prompt", "3", "--prompt", "3", *long, *short, "--most", "8")
    alone = [decoded(project, "--prompt", "3", *one, "--most", "8")[0] for one in (long, short)]
    assert both == alone
    assert alone[0] != alone[1]


def test_the_end_of_a_sequence_is_no_error(projects: Projects) -> None:
    project = projects.make("loop", "javascript", MARIAN)
    (row,) = decoded(project, "--prompt", "3,4", "--source", "5,6", "--most", "1000")
    assert len(row.split(",")) == 64 - 2 + 1


def test_a_plain_trace_names_no_run(projects: Projects, tmp_path: Path) -> None:
    project, trace = projects.make("loop", "javascript", MARIAN), tmp_path / "loop.jsonl"
    words = ("--model", str(MARIAN), "--prompt", "3", "--source", "5,6,7", "--most", "4")
    node(project, "main.js", *words, trace=trace)
    assert {next(iter(line)) for line in lines(trace)} == {"file"}
    done = kvdoctor("step-test", MARIAN, "--consumer", "held", "--trace", trace, "--format", "json")
    assert done.returncode == 0
    assert not [f for f in json.loads(done.stdout)["findings"] if f["severity"] != "note"]
