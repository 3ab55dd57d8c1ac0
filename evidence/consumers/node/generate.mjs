// Decodes with transformers.js what its own `generate` gives.
//
//   node generate.mjs FOLDER INPUTS.json STEPS
//
// FOLDER holds the configs, and the graphs in onnx/. INPUTS: `input_ids`, a row of tokens, and `class`, the name of the
// class of transformers.js. Prints the greedy tokens, those of the prompt left out, as a JSON list.
import { readFileSync } from "node:fs";
import { basename, dirname, resolve } from "node:path";
import * as library from "@huggingface/transformers";

const [folder, inputsFile, steps] = process.argv.slice(2);
const inputs = JSON.parse(readFileSync(inputsFile, "utf-8"));
library.env.allowRemoteModels = false;
library.env.localModelPath = dirname(resolve(folder));
const model = await library[inputs.class].from_pretrained(basename(folder), { dtype: "fp32", device: "cpu" });
const shape = [1, inputs.input_ids.length];
const ids = new library.Tensor("int64", BigInt64Array.from(inputs.input_ids.map(BigInt)), shape);
const mask = new library.Tensor("int64", new BigInt64Array(inputs.input_ids.length).fill(1n), shape);
const found = await model.generate({
  inputs: ids,
  attention_mask: mask,
  max_new_tokens: Number(steps),
  min_new_tokens: Number(steps),
  do_sample: false,
});
const skipped = inputs.class.includes("Seq2Seq") ? 1 : inputs.input_ids.length;
console.log(JSON.stringify(Array.from(found.data, Number).slice(skipped)));
