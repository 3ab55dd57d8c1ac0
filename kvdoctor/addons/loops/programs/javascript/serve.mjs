// Serves this folder, and that of the model as model/, to a browser of this machine; takes the trace of the page.
// The two headers let WebAssembly use threads.

import { createReadStream, createWriteStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, resolve, sep } from "node:path";
import { pipeline } from "node:stream/promises";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

/** @type {Record<string, string>} */
const TYPES = { ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".mjs": "text/javascript" };
const HEADERS = {
  "cache-control": "no-store",
  "cross-origin-embedder-policy": "require-corp",
  "cross-origin-opener-policy": "same-origin",
};
const HERE = fileURLToPath(new URL(".", import.meta.url));

const { values: given } = parseArgs({
  options: {
    model: { type: "string" },
    port: { type: "string", default: "8080" },
    provider: { type: "string", default: "wasm" },
    record: { type: "string", default: "trace.jsonl" },
  },
});
const { model: folder = "", record } = given;
if (folder === "") {
  console.error("node serve.mjs --model FOLDER [--provider wasm|webgpu|webnn] [--record trace.jsonl] [--port 8080]");
  process.exit(2);
}

/** The file that a path of the address stands for; undefined outside of the two folders. @param {string} path */
function fileOf(path) {
  const parts = decodeURIComponent(path).split("/").slice(1);
  const root = resolve(parts[0] === "model" ? folder : HERE);
  const file = resolve(root, join(".", ...(parts[0] === "model" ? parts.slice(1) : parts)));
  return file.startsWith(root + sep) ? file : undefined;
}

/** @import { IncomingMessage, ServerResponse } from "node:http" */
/** Answer a request; an error becomes the answer 404. @param {IncomingMessage} request @param {ServerResponse} response */
async function answer(request, response) {
  const { pathname } = new URL(request.url ?? "/", "http://localhost");
  if (request.method === "POST" && pathname === "/record") {
    // Only the page itself may write: other sites can send requests to this address as well.
    if (request.headers.origin !== `http://${request.headers.host}`) {
      response.writeHead(403, HEADERS).end();
      return;
    }
    await pipeline(request, createWriteStream(record));
    response.writeHead(204, HEADERS).end();
    console.log(`${record} written`);
    return;
  }
  const file = fileOf(pathname === "/" ? "/index.html" : pathname);
  if (file === undefined || !(await stat(file)).isFile()) {
    throw new Error(`no file ${pathname}`);
  }
  const type = TYPES[extname(file)] ?? (file.endsWith(".wasm") ? "application/wasm" : "application/octet-stream");
  response.writeHead(200, { ...HEADERS, "content-type": type });
  await pipeline(createReadStream(file), response);
}

const server = createServer((request, response) => {
  answer(request, response).catch(() => {
    if (response.headersSent) {
      response.destroy();
    } else {
      response.writeHead(404, HEADERS).end();
    }
  });
});
server.listen(Number(given.port), "127.0.0.1", () => {
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  const provider = encodeURIComponent(given.provider);
  console.log(`http://127.0.0.1:${port}/?provider=${provider}&model=model&post=record`);
});
