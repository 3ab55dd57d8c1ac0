// The runs of vectors.json, played and recorded. Without Node, so that a browser has them too.

import { check } from "./check.js";
import { likeliest } from "./decoder.js";
import { product } from "./tensors.js";

/** @import { Decoder } from "./decoder.js" */
/** @import { Run, Source, Tokens, TracedCall } from "./types.js" */

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
    vectors?.schema === "kvdoctor/loop-vectors/1" && vectors.runs.length > 0,
    "the file of runs has another schema than kvdoctor/loop-vectors/1, or no run",
  );
  host.write(JSON.stringify(vectors)); // what is due, so that a run that is missing is seen
  let name = "";
  let good = true;
  /** @type {Promise<Decoder> | undefined} */
  let decoder;
  for (const run of /** @type {Run[]} */ (vectors.runs)) {
    name = run.name;
    /** @type {number[][]} */
    let tokens = [];
    /** @type {string | null} */
    let error = null;
    try {
      decoder ??= host.open((call) => host.write(JSON.stringify({ run: name, ...call })));
      tokens = await play(await decoder, run, host);
    } catch (raised) {
      error = raised instanceof Error ? raised.message : String(raised);
    }
    host.write(JSON.stringify({ run: name, tokens, error }));
    const problem = error === null ? difference(tokens, run.expect) : `error: ${error}`;
    host.report(name, problem ?? "as expected", problem === undefined);
    good &&= problem === undefined;
  }
  return good;
}

/**
 * The likeliest token after the prompts and after each further token of a run, whatever the one before left.
 *
 * @param {Decoder} decoder
 * @param {Run} run
 * @param {Host} host
 */
async function play(decoder, { prompts, follow, source, self_test: test }, host) {
  decoder.reset();
  if (source !== null) {
    await decoder.encode("shape" in source ? floatsOf(await host.read(source.file), source.shape) : source);
  }
  const made = (await decoder.prefill(prompts)).map((logits) => [likeliest(logits)]);
  for (const at of follow[0]?.keys() ?? []) {
    const logits = await decoder.step(follow.map((row) => [row[at]]));
    logits.forEach((row, sequence) => made[sequence].push(likeliest(row)));
  }
  if (test !== null) {
    // The last step again, after going back, and perhaps with the rows backwards and the first one once more.
    const rows = [...follow.keys()];
    const order = test === "reorder" ? rows.reverse().concat(0) : rows;
    await decoder.rewind(1);
    if (test === "reorder") {
      await decoder.reorder(order);
    }
    const got = (await decoder.step(order.map((row) => follow[row].slice(-1)))).map(likeliest);
    const expected = order.map((row) => made[row].at(-1));
    check(String(got) === String(expected), `${test}: ${got} in place of ${expected}`);
  }
  return made;
}

/**
 * Numbers given as float32, little endian.
 *
 * @param {Uint8Array} bytes
 * @param {number[]} shape
 * @returns {Source}
 */
export function floatsOf(bytes, shape) {
  check(bytes.length === product(shape) * 4, `the source has ${bytes.length} bytes, which is not float32[${shape}]`);
  return { data: new Float32Array(Uint8Array.from(bytes).buffer), shape }; // a copy begins where a float may
}

/** The first place where other tokens were likeliest than expected. @param {Tokens} tokens @param {Tokens} expected */
function difference(tokens, expected) {
  for (const [sequence, row] of expected.entries()) {
    const step = row.findIndex((token, at) => token !== -1 && token !== tokens[sequence][at]);
    if (step >= 0) {
      return `sequence ${sequence}, step ${step}: token ${tokens[sequence][step]} in place of ${row[step]}`;
    }
  }
  return undefined;
}
