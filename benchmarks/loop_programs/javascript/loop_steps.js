// Steps of the program of a loop: `node loop_steps.js MODEL PROMPT STEPS`, in the folder of the project.
// Each line of standard input is a number of steps to take; a line says when they are taken.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import * as ort from "onnxruntime-node";

import { Decoder, likeliest } from "./src/decoder.js";

const [model, prompt] = process.argv.slice(2);
const session = { intraOpNumThreads: 1 };
const decoder = await Decoder.open(ort, model, JSON.parse(readFileSync("contract.json", "utf8")), { session });
let logits = await decoder.prefill([Array.from({ length: Number(prompt) }, (_, at) => at + 1)]);
console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  for (let step = 0; step < Number(line); step++) {
    logits = await decoder.step([[likeliest(logits[0])]]);
  }
  console.log("done");
}
