// The calls of that loop without a loop: `node bare_steps.js MODEL PROMPT STEPS`.
// All inputs but the cache are made in advance.

import { createInterface } from "node:readline";

import { InferenceSession, Tensor } from "onnxruntime-node";

const [model, prompt, steps] = process.argv.slice(2);
const session = await InferenceSession.create(`${model}/model.onnx`, { intraOpNumThreads: 1 });
const pasts = session.inputNames.filter((name) => name.startsWith("past"));
const shapes = new Map(session.inputMetadata.map((one) => [one.name, one.shape]));

const ints = (from, count, step = 1) =>
  new Tensor("int64", BigInt64Array.from({ length: count }, (_, at) => BigInt(from + at * step)), [1, count]);
const made = (past, count) => ({
  input_ids: ints(1, count),
  attention_mask: ints(1, past + count, 0),
  position_ids: ints(past, count),
});

const calls = [made(0, Number(prompt))];
for (let step = 0; step < Number(steps); step++) {
  calls.push(made(Number(prompt) + step, 1));
}
let cache = {};
for (const name of pasts) {
  const [, heads, , width] = shapes.get(name);
  cache[name] = new Tensor("float32", new Float32Array(0), [1, heads, 0, width]);
}
let done = 0;

async function call() {
  const feeds = { ...calls[done++], ...cache };
  const outputs = await session.run(feeds, session.outputNames);
  for (const name of pasts) {
    cache[name] = outputs[name.replace("past_key_values", "present")];
  }
}

await call();
console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  for (let step = 0; step < Number(line); step++) {
    await call();
  }
  console.log("done");
}
