// The runs of vectors.json, played and recorded. Without Node, so that a browser has them too.

import { check } from "./check.js";
import { likeliest } from "./decoder.js";
import { product } from "./tensors.js";

/** @import { Decoder } from "./decoder.js" */
/** @import { RunCall, Source, TracedCall } from "./types.js" */

/**
 * What the runs need of the program around them.
 *
 * @typedef {object} Host
 * @property {(trace: (call: TracedCall) => void) => Promise<Decoder>} open - Opens the model.
 * @property {(file: string) => Promise<Uint8Array>} read - Reads a file of the folder of vectors.json.
 * @property {(line: string) => void} write - Takes a line of the trace.
 * @property {(name: string, outcome: string, good: boolean) => void} report - Takes the outcome of a run.
 */

/**
 * Play all runs with one decoder, and record them; returns whether all were as expected.
 *
 * @param {any} vectors - the object in vectors.json
 * @param {Host} host
 */
export async function playRuns(vectors, host) {
  check(
    vectors?.schema === "kvdoctor/loop-vectors/2" && vectors.runs.length > 0,
    "the file of runs has another schema than kvdoctor/loop-vectors/2, or no run",
  );
  host.write(JSON.stringify(vectors)); // what is due, so that a run that is missing is seen
  let name = "";
  let good = true;
  /** @type {Promise<Decoder> | undefined} */
  let decoder;
  for (const run of /** @type {{ name: string, calls: RunCall[] }[]} */ (vectors.runs)) {
    name = run.name;
    /** @type {number[][]} */
    const tokens = [];
    /** @type {[error: string | null, problem: string]} */
    let [error, problem] = [null, ""];
    try {
      decoder ??= host.open((call) => host.write(JSON.stringify({ run: name, ...call })));
      (await decoder).reset();
      for (const call of run.calls) {
        const logits = await make(await decoder, call, host);
        if (logits !== undefined && "expect" in call) {
          const found = logits.map(likeliest);
          const right = call.expect.every((due, row) => due === -1 || due === found[row]);
          problem ||= right ? "" : `step ${tokens.length}: ${found} in place of ${call.expect}`;
          tokens.push(found);
        }
      }
    } catch (raised) {
      error = raised instanceof Error ? raised.message : String(raised);
      problem = `error: ${error}`;
    }
    host.write(JSON.stringify({ run: name, tokens, error }));
    host.report(name, problem || "as expected", problem === "");
    good &&= problem === "";
  }
  return good;
}

/** Make a call of a run; returns its logits. @param {Decoder} decoder @param {RunCall} call @param {Host} host */
async function make(decoder, call, host) {
  switch (call.call) {
    case "prefill":
      return decoder.prefill(call.rows);
    case "step":
      return decoder.step(call.rows);
    case "encode":
      return decoder.encode(call.rows);
    case "encode-file":
      return decoder.encode(floatsOf(await host.read(call.file), call.shape));
    case "rewind":
      return decoder.rewind(call.count);
    case "reorder":
      return decoder.reorder(call.order);
  }
}

/** Numbers given as float32, little endian. @param {Uint8Array} bytes @param {number[]} shape @returns {Source} */
export function floatsOf(bytes, shape) {
  check(bytes.length === product(shape) * 4, `the source has ${bytes.length} bytes, which is not float32[${shape}]`);
  return { data: new Float32Array(Uint8Array.from(bytes).buffer), shape }; // a copy begins where a float may
}
