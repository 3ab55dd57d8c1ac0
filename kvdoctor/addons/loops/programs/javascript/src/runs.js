// The runs of vectors.json, played and recorded. Without Node, so that a browser has them too.

import { likeliest } from "./decoder.js";
import { product } from "./tensors.js";

/** @import { Decoder, Source, TracedCall } from "./decoder.js" */

/** @typedef {number[][]} Rows Token ids, a list for each sequence. */

/**
 * One run: after the prompts, the tokens of `follow` are fed one by one, whatever is likeliest.
 *
 * @typedef {object} Run
 * @property {string} name - Its name.
 * @property {Rows} prompts - With what each sequence begins.
 * @property {Rows | null} follow - With what each goes on.
 * @property {Rows | { file: string, shape: number[] } | null} source - Ids, or a file of float32, little endian.
 * @property {Rows} expect - The likeliest token after the prompt and after each further one; -1 where any is right.
 * @property {string | null} self_test - Afterwards the last step is taken again: rewind, reorder.
 */

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
  if (vectors?.schema !== "kvdoctor/loop-vectors/1" || vectors.runs.length === 0) {
    throw new Error("the file of runs has another schema than kvdoctor/loop-vectors/1, or no run");
  }
  host.write(JSON.stringify(vectors)); // what is due, so that a run that is missing is seen
  let name = "";
  let good = true;
  /** @type {Promise<Decoder> | undefined} */
  let decoder;
  for (const run of /** @type {Run[]} */ (vectors.runs)) {
    name = run.name;
    /** @type {Rows} */
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
    host.report(name, problem ?? "as expected", problem === null);
    good &&= problem === null;
  }
  return good;
}

/**
 * Play one run, whatever the one before left in the decoder.
 *
 * @param {Decoder} decoder
 * @param {Run} run
 * @param {Host} host
 */
async function play(decoder, { prompts, follow, source, self_test: test }, host) {
  decoder.reset();
  if (source !== null) {
    const floats = !Array.isArray(source);
    await decoder.encode(floats ? floatsOf(await host.read(source.file), source.shape) : source);
  }
  const made = await followTokens(decoder, prompts, follow ?? []);
  if (test !== null) {
    await selfTest(decoder, test, follow ?? [], made);
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
  if (bytes.length !== product(shape) * 4) {
    throw new Error(`the source has ${bytes.length} bytes, which is not float32[${shape}]`);
  }
  return { data: new Float32Array(Uint8Array.from(bytes).buffer), shape }; // a copy begins where a float may
}

/**
 * The likeliest token after the prompt and after each given one, whatever was likeliest before.
 *
 * @param {Decoder} decoder
 * @param {Rows} prompts
 * @param {Rows} follow
 * @param {() => void} [onToken]
 */
export async function followTokens(decoder, prompts, follow, onToken) {
  const count = follow[0]?.length ?? 0;
  if ((count > 0 && follow.length !== prompts.length) || follow.some((row) => row.length !== count)) {
    throw new Error("give the same number of ids to follow for each prompt");
  }
  const made = (await decoder.prefill(prompts)).map((logits) => [likeliest(logits)]);
  onToken?.();
  for (let at = 0; at < count; at++) {
    const logits = await decoder.step(follow.map((row) => [row[at]]));
    onToken?.();
    logits.forEach((row, sequence) => made[sequence].push(likeliest(row)));
  }
  return made;
}

/**
 * Take the last step again after going back, or after changing rows: the tokens must be the same.
 *
 * @param {Decoder} decoder
 * @param {string} test
 * @param {Rows} follow
 * @param {Rows} made
 */
export async function selfTest(decoder, test, follow, made) {
  if (!["rewind", "reorder"].includes(test) || !follow[0]?.length) {
    throw new Error(`a self-test is rewind or reorder, and needs tokens to follow; got ${test}`);
  }
  const rows = [...follow.keys()];
  // The rows backwards, and the first one once more.
  const order = test === "reorder" ? rows.reverse().concat(0) : rows;
  await decoder.rewind(1);
  if (test === "reorder") {
    await decoder.reorder(order);
  }
  const got = (await decoder.step(order.map((row) => follow[row].slice(-1)))).map(likeliest);
  const expected = order.map((row) => made[row].at(-1));
  if (String(got) !== String(expected)) {
    throw new Error(`${test}: ${got} in place of ${expected}`);
  }
}

/**
 * The first place where other tokens were likeliest than expected.
 *
 * @param {Rows} tokens
 * @param {Rows} expected
 */
function difference(tokens, expected) {
  for (const [sequence, row] of expected.entries()) {
    const found = tokens[sequence] ?? [];
    const step = row.findIndex((token, at) => token !== -1 && token !== found[at]);
    if (step >= 0 || found.length !== row.length) {
      const at = step >= 0 ? step : Math.min(found.length, row.length);
      return `sequence ${sequence}, step ${at}: token ${found[at]} in place of ${row[at]}`;
    }
  }
  return null;
}
