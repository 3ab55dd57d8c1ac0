// Calls on two models in one process: `[what it is, a call, what it says]`; prints those that say something else.
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-node";
import { searchBeams } from "./src/beams.js";
import { Decoder, likeliest, sampler } from "./src/decoder.js";

const [, , marianFolder, llamaFolder, bufferFolder] = process.argv;
const contract = (folder) => JSON.parse(readFileSync(`${folder}/contract.json`, "utf8"));
const model = (folder) => readFileSync(`${folder}/model.path`, "utf8");
const open = (folder, change = {}, options = {}) =>
  Decoder.open(ort, model(folder), { ...contract(folder), ...change }, options);
const marian = await open(marianFolder);
const llama = await open(llamaFolder);
const buffer = await open(bufferFolder, {}, { capacity: 4 });
const aborted = AbortSignal.abort(new Error("stop"));
const found = [];

async function says(call, expected = null) {
  const said = await call().then(() => null, (error) => error.message);
  if ((said === null) !== (expected === null) || !(said ?? "").includes(expected ?? "")) {
    found.push([String(call), said]);
  }
}
function same(one, other) {
  if (JSON.stringify(one) !== JSON.stringify(other)) {
    found.push([one, other]);
  }
}

// Calls that cannot be right.
await says(() => marian.prefill([[1]]), "begin with encode()");
await says(() => marian.encode([]), "the source: give rows of the same length, at least 1");
await says(() => marian.encode([[5, 0.5]]), "the ids of the source are whole numbers, 0 or more");
await says(() => marian.encode([[5, 6]], [[1]]), "the mask has shape [1,2]; got [1,1]");
await says(() => marian.encode({ data: new Float32Array(2), shape: [2] }), "the source is int64[batch,encoder_input]");
await says(() => marian.encode([[5, 6]]));
await says(() => marian.step([[1]]), "begin with prefill()");
await says(() => marian.rewind(5), "cannot forget 5 of 0 tokens");
await says(() => marian.prefill([[]]), "every sequence begins with at least one token");
await says(() => marian.prefill([[1], [1]]), "2 prompts for 1 sources");
await says(() => marian.prefill([[128]]), "token ids are whole numbers, 0 to 127");
await says(() => marian.prefill([[1.5]]), "token ids are whole numbers, 0 to 127");
await says(() => marian.prefill([[1]], { signal: aborted }), "stop");
await says(() => marian.prefill([[1]]));
await says(() => marian.step([[1], [2]]), "a step takes tokens of each of 1 sequences");
await says(() => marian.step([Array(64).fill(1)]), "a sequence has at most 64 tokens here");
await says(() => marian.step([[2]], { signal: aborted }), "stop");
await says(() => marian.reorder([1]), "there are 1 sequences, not all of: 1");
await says(() => marian.reorder([0, 0]));
await says(() => marian.step([[1], [2]]));
await says(() => marian.prefill([[1]])); // the source is still there, for one sequence
await says(() => marian.encode([[5, 6], [7]]));
await says(() => marian.prefill([[1], [1, 2]]), "the prompts of a batch must have the same length");
await says(() => marian.prefill([[1], [2]]));
const under = marian.step([[1], [2]]);
await says(() => marian.rewind(0), "another call of this decoder is under way");
await under;
await says(() => llama.generate([[1]], { most: 0 }), "most is 1 or more; got 0");
await says(() => llama.generate([[1]], { topP: 0 }), "topP above 0");
await says(() => buffer.generate([[1, 2, 3]], { most: 20 }));
same(buffer.tokens[0].length, 4);
await says(() => buffer.step([[1]]), "a sequence has at most 4 tokens here");
await says(() => open(bufferFolder, {}, { capacity: 0.5 }), "the capacity is a whole number above 0; got 0.5");

// What opens no model.
const { files } = contract(llamaFolder);
const sized = { input_ids: { dtype: "int32", shape: [-1, -1] } };
await says(() => open(llamaFolder, { schema: "kvdoctor/loop/9" }), "schema kvdoctor/loop/9");
await says(() => open(llamaFolder, { files: contract(marianFolder).files }), "");
await says(() => open(llamaFolder, { files: [{ ...files[0], outputs: ["nothing"] }] }), "has no nothing");
await says(
  () => open(llamaFolder, { files: [{ ...files[0], inputs: { ...files[0].inputs, ...sized } }] }),
  "contract.json is of another model: model.onnx declares input_ids as int64",
);

// What decodes: a stream, its end, a second turn, a copy, a callback that throws.
const alone = await llama.generate([[5, 6, 7]], { most: 6, stop: [] });
const streamed = [];
for await (const { token } of llama.stream([[5, 6, 7]], { most: 6, stop: [] })) {
  streamed.push(token);
  if (streamed.length === 3) break;
}
same(streamed, alone[0].slice(0, 3));
same(await searchBeams(llama.another(), [5, 6, 7], { beams: 1, most: 6 }), alone[0]);
same(llama.tokens, [[5, 6, 7, ...streamed.slice(0, 2)]]);
const second = await llama.generate([streamed.slice(2)], { most: 3, stop: [], continued: true });
same(second[0], alone[0].slice(3));
const twin = llama.another();
same(await twin.generate([[5, 6, 7]], { most: 6, stop: [] }), alone);
same(llama.tokens[0].length, 8);
const before = llama.tokens;
const fails = { most: 1, continued: true, choose: () => { throw new Error("no choice"); } };
await says(() => llama.generate([[9]], fails), "no choice");
same(llama.tokens, [[...before[0], 9]]);
await llama.rewind(1);
await says(() => llama.step([[999]]), "token ids are whole numbers");
same(llama.tokens, before);

// The logits of all new tokens are those of one call for each.
const whole = (await llama.prefill([[5, 6, 7], [8]], { every: true })).map((row) => row.length / 128);
same(whole, [3, 1]);
const [first] = await llama.prefill([[5]]);
const [rows] = await llama.step([[6, 7]], { every: true });
await llama.rewind(2);
const steps = [await llama.step([[6]]), await llama.step([[7]])];
same([likeliest(rows.subarray(0, 128)), likeliest(rows.subarray(128))], steps.map(([row]) => likeliest(row)));

// Sampling.
const logits = Float32Array.from([1, 3, 2, -1]);
const drawn = (how) => [...new Set(Array.from({ length: 200 }, (_, seed) => sampler({ ...how, seed })(logits, [1])))].sort();
same(drawn({}), [1]);
same(drawn({ temperature: 5 }), [0, 1, 2, 3]);
same(drawn({ temperature: 5, topK: 2 }), [1, 2]);
same(drawn({ temperature: 1, topP: 0.7 }), [1, 2]);
same(drawn({ temperature: 1, minP: 0.2 }), [1, 2]);
same(drawn({ repetitionPenalty: 2 }), [2]);
same(first.length, 128);
await Promise.all([marian, llama, buffer].map((decoder) => decoder.close()));
console.log(JSON.stringify(found));
