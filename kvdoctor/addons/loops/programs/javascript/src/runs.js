// The runs of vectors.json, played and recorded. Without Node, so that a browser has them too.

import { check } from "./check.js";
import { likeliest } from "./decoder.js";

/** @import { Decoder } from "./decoder.js" */
/** @import { RunCall, TracedCall } from "./types.js" */

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
  let [name, good] = ["", true];
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
        const found = (await make(await decoder, call, host)).flat();
        if ("expect" in call) {
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

/** What each call has, @type {Record<string, string[]>} */
const NEEDED = {
  prefill: ["rows"],
  step: ["rows"],
  generate: ["rows"],
  encode: ["rows"],
  "encode-file": ["file", "shape"],
  rewind: ["count"],
  reorder: ["order"],
};
const SAMPLING = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"];

/** Refuse a call without what it needs, or with a key that nothing reads. @param {RunCall} call */
function checkKeys(call) {
  const needed = NEEDED[call.call];
  check(needed, `there is no call ${JSON.stringify(call)}`);
  const missing = needed.find((key) => !(key in call));
  check(missing === undefined, `the call ${call.call} needs ${missing}`);
  const known = ["call", "expect", ...needed, ...(call.call === "generate" ? ["most", "stop", ...SAMPLING] : [])];
  const unknown = Object.keys(call).find((key) => !known.includes(key));
  check(unknown === undefined, `the call ${call.call} takes no ${unknown}`);
}

/**
 * Make a call of a run: the tokens of each sequence that it generates, or the likeliest one after it.
 *
 * @param {Decoder} decoder
 * @param {RunCall} call - of a file the numbers are float32, little endian
 * @param {Pick<Host, "read">} host
 * @returns {Promise<number[][]>}
 */
export async function make(decoder, call, host) {
  checkKeys(call);
  switch (call.call) {
    case "prefill":
      return (await decoder.prefill(call.rows)).map((row) => [likeliest(row)]);
    case "step":
      return (await decoder.step(call.rows)).map((row) => [likeliest(row)]);
    case "generate":
      return decoder.generate(call.rows, {
        ...call,
        topK: call.top_k || undefined,
        topP: call.top_p,
        minP: call.min_p,
        repetitionPenalty: call.repetition_penalty,
      });
    case "encode":
      await decoder.encode(call.rows);
      break;
    case "encode-file": // a copy begins where a float may
      const { buffer } = Uint8Array.from(await host.read(call.file));
      await decoder.encode({ data: new Float32Array(buffer), shape: call.shape });
      break;
    case "rewind":
      await decoder.rewind(call.count);
      break;
    case "reorder":
      await decoder.reorder(call.order);
      break;
  }
  return [];
}
