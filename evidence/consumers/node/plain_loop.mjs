// Decodes with onnxruntime-node as a loop written by hand does: every present is fed back as the next past.
//
//   node plain_loop.mjs FOLDER INPUTS.json STEPS
//
// FOLDER holds model.onnx, or decoder_model_merged.onnx with encoder_model.onnx. INPUTS: `input_ids`, a row of tokens,
// and `start`, the token that a decoder behind an encoder begins with. Prints the greedy tokens as a JSON list.
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-node";

const [folder, inputsFile, steps] = process.argv.slice(2);
const inputs = JSON.parse(readFileSync(inputsFile, "utf-8"));
const integers = (values) => new ort.Tensor("int64", BigInt64Array.from(values.map(BigInt)), [1, values.length]);
const ones = (length) => integers(Array(length).fill(1));
const merged = existsSync(join(folder, "decoder_model_merged.onnx"));
const decoder = await ort.InferenceSession.create(join(folder, merged ? "decoder_model_merged.onnx" : "model.onnx"));

let given = {};
if (merged) {
  const encoder = await ort.InferenceSession.create(join(folder, "encoder_model.onnx"));
  const mask = ones(inputs.input_ids.length);
  const states = (await encoder.run({ input_ids: integers(inputs.input_ids), attention_mask: mask })).last_hidden_state;
  given = { encoder_hidden_states: states, encoder_attention_mask: mask };
}

const past = {};
for (const { name, shape } of decoder.inputMetadata.filter((entry) => entry.name.startsWith("past_key_values."))) {
  past[name] = new ort.Tensor("float32", new Float32Array(0), [1, shape[1], 0, shape[3]]);
}
let fed = merged ? [inputs.start] : inputs.input_ids;
let length = 0;
const tokens = [];
for (let step = 0; step < Number(steps); step++) {
  const positions = fed.map((_, index) => length + index);
  const all = {
    ...given,
    ...past,
    input_ids: integers(fed),
    attention_mask: ones(length + fed.length),
    position_ids: integers(positions),
    use_cache_branch: new ort.Tensor("bool", [step > 0], [1]),
  };
  const feeds = Object.fromEntries(decoder.inputNames.map((name) => [name, all[name]]));
  const results = await decoder.run(feeds);
  for (const name of decoder.outputNames.filter((name) => name.startsWith("present."))) {
    past[name.replace("present.", "past_key_values.")] = results[name];
  }
  const width = results.logits.dims[2];
  const last = results.logits.data.slice(-width);
  length += fed.length;
  fed = [last.indexOf(Math.max(...last))];
  tokens.push(fed[0]);
}
console.log(JSON.stringify(tokens));
