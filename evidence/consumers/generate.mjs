// Decodes greedily with transformers.js on an export: node generate.mjs MODULES FOLDER CLASS INPUTS.json
//
// MODULES is the folder of node_modules; the export lies in FOLDER/onnx, its configs in FOLDER. INPUTS holds the tensors by
// name, {"type", "dims", "data"}. Prints one JSON document: the tokens.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, folder, kind, inputs, newTokens] = process.argv.slice(2);
const require = createRequire(pathToFileURL(join(modules, "index.js")));
const library = await import(pathToFileURL(require.resolve("@huggingface/transformers")).href);
const { env, Tensor } = library;
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = dirname(folder);

const given = {};
for (const [name, { type, dims, data }] of Object.entries(JSON.parse(readFileSync(inputs, "utf-8")))) {
  given[name] = new Tensor(type, type === "int64" ? BigInt64Array.from(data, BigInt) : Float32Array.from(data), dims);
}
const model = await library[kind].from_pretrained(basename(folder), { dtype: "fp32", device: "cpu", local_files_only: true });
const tokens = await model.generate({ ...given, max_new_tokens: Number(newTokens), do_sample: false, num_beams: 1 });
console.log(JSON.stringify(tokens.tolist().map((row) => row.map(Number))));
