// The page that plays the runs of vectors.json in a browser. In its address: ?provider=wasm, webgpu or webnn,
// &model=URL of the model's folder; &outputs=gpu-buffer leaves the cache on a WebGPU device.

import { check } from "./check.js";
import { Decoder } from "./decoder.js";
import { playRuns } from "./runs.js";
import { ARRAYS } from "./tensors.js";

/** @import { Runtime, Tensor } from "./tensors.js" */

const RUNTIME = new URL("../node_modules/onnxruntime-web/dist/ort.all.min.mjs", import.meta.url);
const PROVIDERS = ["wasm", "webgpu", "webnn"];
/** @type {Record<string, [string, string[]]>} What is called for each piece of work that a device is given. */
const WORK = {
  webgpu: ["GPUComputePassEncoder", ["dispatchWorkgroups", "dispatchWorkgroupsIndirect"]],
  webnn: ["MLContext", ["dispatch", "compute"]],
};

// The runtime computes nodes that the provider does not take as WebAssembly, and does not say so.
/** Count what a provider gives its device to do. @param {string} provider */
function countWork(provider) {
  const counted = { pieces: 0 };
  const [owner, methods] = WORK[provider] ?? ["", []];
  const kind = /** @type {any} */ (globalThis)[owner]?.prototype ?? {};
  for (const method of methods.filter((name) => name in kind)) {
    const call = kind[method];
    kind[method] = function (/** @type {unknown[]} */ ...values) {
      counted.pieces++;
      return call.apply(this, values);
    };
  }
  return counted;
}

/** The provider, and the device that it was given. @param {string} provider */
async function describe(provider) {
  if (provider !== "webgpu") {
    return provider;
  }
  const adapter = await /** @type {any} */ (navigator).gpu?.requestAdapter();
  const { vendor = "", architecture = "", isFallbackAdapter } = adapter?.info ?? {};
  const software = isFallbackAdapter || architecture === "swiftshader" ? ", a software adapter" : "";
  return `webgpu (${[vendor, architecture].filter(Boolean).join(" ") || "no adapter"}${software})`;
}

// `getData` would move it off the device.
/** What a tensor holds, which stays where it is. @param {Runtime} ort @param {Tensor} value */
async function read(ort, value) {
  if (value.location !== "gpu-buffer") {
    return value.getData();
  }
  const device = await ort.env.webgpu.device;
  const { size } = value.gpuBuffer;
  const copy = device.createBuffer({ size, usage: 0x9 }); // COPY_DST | MAP_READ
  const commands = device.createCommandEncoder();
  commands.copyBufferToBuffer(value.gpuBuffer, 0, copy, 0, size);
  device.queue.submit([commands.finish()]);
  await copy.mapAsync(0x1); // READ
  const bytes = copy.getMappedRange().slice(0);
  copy.destroy();
  const Elements = /** @type {any} */ (ARRAYS[value.type === "float32" ? "float" : value.type]);
  return new Elements(bytes, 0, value.size);
}

/** @param {string} id */
const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

// What comes from the model or the runtime is shown as text only.
/** Say how far the page is. @param {string} text @param {string} state */
function show(text, state) {
  element("status").textContent = text;
  element("status").dataset["state"] = state;
}

/** Add a run to the table. @param {string} name @param {string} outcome @param {boolean} good */
function report(name, outcome, good) {
  const row = document.createElement("tr");
  for (const text of [name, outcome]) {
    row.appendChild(document.createElement("td")).textContent = text;
  }
  row.dataset["state"] = good ? "good" : "bad";
  element("runs").append(row);
}

/** A file of the folder of the page. @param {string} file */
async function fetched(file) {
  const response = await fetch(file);
  check(response.ok, `${file}: ${response.status} ${response.statusText}`);
  return response;
}

/** Play the runs, and give their trace to the user. */
async function main() {
  const asked = new URLSearchParams(location.search);
  const [provider, outputs] = [asked.get("provider") ?? "wasm", asked.get("outputs") ?? "cpu"];
  const model = asked.get("model") ?? "model";
  check(PROVIDERS.includes(provider), `there is no provider ${provider}; a browser has ${PROVIDERS.join(", ")}`);
  check(
    outputs === "cpu" || (outputs === "gpu-buffer" && provider === "webgpu"),
    `outputs are cpu, with webgpu also gpu-buffer; not ${outputs}`,
  );
  /** @type {Runtime} */
  const ort = await import(RUNTIME.href).catch((error) => {
    throw new Error(`${error.message}; install it: npm install onnxruntime-web@1.30.0`);
  });
  const preferredOutputLocation = /** @type {"cpu" | "gpu-buffer"} */ (outputs);
  const session = { executionProviders: [provider], preferredOutputLocation };
  const [contract, vectors] = await Promise.all(
    ["contract.json", "vectors.json"].map(async (file) => (await fetched(file)).json()),
  );
  document.title = contract.model;
  element("model").textContent = contract.model;
  const device = await describe(provider);
  const counted = countWork(provider);
  element("provider").textContent = device;
  show("The runs are under way.", "busy");
  /** @type {string[]} */
  const lines = [];
  const good = await playRuns(vectors, {
    open: (trace) => Decoder.open(ort, model, contract, { session, trace, read: (value) => read(ort, value) }),
    read: async (file) => new Uint8Array(await (await fetched(file)).arrayBuffer()),
    write: (line) => lines.push(line + "\n"),
    report,
  });
  if (provider in WORK) {
    element("provider").textContent = `${device}, ${counted.pieces} kernels; nodes without one ran as WebAssembly`;
    check(!good || counted.pieces > 0, `nothing ran on ${provider}: all nodes were computed as WebAssembly`);
  }
  const trace = new Blob(lines, { type: "application/jsonl" });
  element("trace").setAttribute("href", URL.createObjectURL(trace));
  element("trace").hidden = false;
  show(good ? "All runs are as expected." : "Not all runs are as expected.", good ? "good" : "bad");
}

try {
  await main();
} catch (error) {
  show(error instanceof Error ? error.message : String(error), "bad");
}
