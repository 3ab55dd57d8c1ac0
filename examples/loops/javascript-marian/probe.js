// Runs with given tokens: those of `--follow`, and those of a probe. Without Node, so that a browser has them too.

import { likeliest } from "./loop.js";

/** @typedef {import("./loop.js").Decoder} Decoder */
/** @typedef {import("./loop.js").Logits} Logits */
/** @typedef {import("./loop.js").TracedCall} TracedCall */

/**
 * What a probe needs of the program around it.
 *
 * @typedef {object} Host
 * @property {(trace: (call: TracedCall) => void) => Promise<Decoder>} open - Opens the model.
 * @property {(line: string) => void} write - Takes a line of the result.
 * @property {(name: string, outcome: string, good: boolean) => void} report - Takes the outcome of a run.
 */

/**
 * One run of a probe.
 *
 * @typedef {object} Run
 * @property {string} name - Its name.
 * @property {number[][]} prompts - What each sequence begins with.
 * @property {number[][]} follows - How each goes on, whatever is likeliest.
 * @property {number[][]} expected - The likeliest token after the prompt and after each further one; -1 where any is right.
 * @property {number[][]} sources - What the encoder reads.
 * @property {string[]} tests - Self-tests.
 */

/**
 * Make all runs of a probe, one a line, with one decoder; tells whether all were as expected.
 *
 * @param {string} text
 * @param {Host} host
 * @returns {Promise<boolean>}
 */
export async function probe(text, host) {
  const lines = text.split("\n").filter((line) => line.trim());
  const runs = lines.map(readRun);
  if (runs.length === 0) {
    throw new Error("the probe has no runs");
  }
  let name = "";
  let good = true;
  /** @type {Promise<Decoder> | undefined} */
  let decoder;
  for (const run of runs) {
    name = run.name;
    /** @type {number[][]} */
    let tokens = [];
    /** @type {string | null} */
    let error = null;
    try {
      decoder ??= host.open((call) => host.write(JSON.stringify({ run: name, ...call })));
      tokens = await decode(await decoder, run);
    } catch (raised) {
      error = raised instanceof Error ? raised.message : String(raised);
    }
    host.write(JSON.stringify({ run: name, tokens, error }));
    const problem = error === null ? difference(tokens, run.expected) : `error: ${error}`;
    host.report(name, problem ?? "as expected", problem === null);
    good &&= problem === null;
  }
  return good;
}

const OPTIONS = ["--run", "--prompt", "--follow", "--expect", "--source", "--self-test"];

/**
 * A run as a line of the probe describes it: options and their values, with single spaces.
 *
 * @param {string} line
 * @returns {Run}
 */
function readRun(line) {
  const words = line.trim().split(" ");
  /** @type {Map<string, string[]>} */
  const given = new Map(OPTIONS.map((option) => [option, []]));
  for (let at = 0; at < words.length; at += 2) {
    const values = given.get(words[at]);
    if (values === undefined || at + 1 === words.length) {
      throw new Error(`a run takes values of ${OPTIONS.join(", ")}; got ${words[at]}`);
    }
    values.push(words[at + 1]);
  }
  /** @param {string} option */
  const all = (option) => given.get(option) ?? [];
  const [name] = all("--run");
  const prompts = all("--prompt").map(readIds);
  if (name === undefined || prompts.length === 0) {
    throw new Error("a run has a name and a prompt");
  }
  const follows = all("--follow").map(readIds);
  return {
    name,
    prompts,
    follows: follows.length > 0 ? follows : prompts.map(() => []),
    expected: all("--expect").map(readIds),
    sources: all("--source").map(readIds),
    tests: all("--self-test").flatMap((names) => names.split(",")),
  };
}

/**
 * Make one run, whatever the one before left in the decoder.
 *
 * @param {Decoder} decoder
 * @param {Run} run
 * @returns {Promise<number[][]>}
 */
async function decode(decoder, run) {
  decoder.reset();
  await encodeIds(decoder, run.sources);
  const made = await follow(decoder, run.prompts, run.follows);
  if (run.tests.length > 0) {
    await selfTest(decoder, run.tests, run.follows, made);
  }
  return made;
}

/**
 * The first place where other tokens were likeliest than expected.
 *
 * @param {number[][]} tokens
 * @param {number[][]} expected
 * @returns {string | null}
 */
function difference(tokens, expected) {
  if (tokens.length !== expected.length) {
    return `${tokens.length} sequences in place of ${expected.length}`;
  }
  for (const [sequence, row] of expected.entries()) {
    if (tokens[sequence].length !== row.length) {
      return `sequence ${sequence}: ${tokens[sequence].length} tokens in place of ${row.length}`;
    }
    const step = row.findIndex((token, at) => token !== -1 && token !== tokens[sequence][at]);
    if (step >= 0) {
      return `sequence ${sequence}, step ${step}: token ${tokens[sequence][step]} in place of ${row[step]}`;
    }
  }
  return null;
}

/**
 * Integers with commas between them.
 *
 * @param {string} text
 * @returns {number[]}
 */
export function readIds(text) {
  const parts = text.split(",").filter(Boolean);
  const numbers = parts.map(Number);
  // Number takes 5.0, 0x5 and 1e1 as well, which are no ids.
  if (!parts.every((part) => /^\s*-?\d+\s*$/.test(part)) || !numbers.every(Number.isSafeInteger)) {
    throw new Error(`not integers with commas: ${text}`);
  }
  return numbers;
}

/**
 * Encode rows of ids; shorter ones are padded on the right, and the mask hides that.
 *
 * @param {Decoder} decoder
 * @param {number[][]} sources
 * @returns {Promise<void>}
 */
export async function encodeIds(decoder, sources) {
  const longest = Math.max(...sources.map((row) => row.length));
  const padded = sources.map((row) => [...row, ...Array(longest - row.length).fill(0)]);
  const mask = padded.map((row, at) => row.map((_, column) => Number(column < sources[at].length)));
  await decoder.encode(padded, mask);
}

/**
 * The likeliest token after the prompt and after each given one, whatever was likeliest before.
 *
 * @param {Decoder} decoder
 * @param {number[][]} prompts
 * @param {number[][]} follows
 * @param {() => void} [onToken]
 * @returns {Promise<number[][]>}
 */
export async function follow(decoder, prompts, follows, onToken) {
  const count = follows[0].length;
  if (follows.length !== prompts.length || follows.some((row) => row.length !== count)) {
    throw new Error("--follow takes the same number of ids for each prompt");
  }
  const made = (await decoder.prefill(prompts)).map((logits) => [likeliest(logits)]);
  onToken?.();
  for (let position = 0; position < count; position++) {
    const logits = await decoder.step(follows.map((row) => [row[position]]));
    onToken?.();
    logits.forEach((row, sequence) => made[sequence].push(likeliest(row)));
  }
  return made;
}

/**
 * Take the last step again after going back, and after changing rows: the tokens must be the same.
 *
 * @param {Decoder} decoder
 * @param {string[]} wanted
 * @param {number[][]} follows
 * @param {number[][]} made
 * @returns {Promise<void>}
 */
export async function selfTest(decoder, wanted, follows, made) {
  const unknown = wanted.filter((name) => name !== "rewind" && name !== "reorder");
  if (unknown.length > 0) {
    throw new Error(`--self-test knows rewind and reorder, not ${unknown.join(", ")}`);
  }
  if (follows[0].length === 0) {
    throw new Error("--self-test needs tokens to --follow");
  }
  const last = follows.map((row) => row.slice(-1));
  const expected = made.map((row) => row[row.length - 1]);
  if (wanted.includes("rewind")) {
    await decoder.rewind(1);
    compare("rewind", await decoder.step(last), expected);
  }
  if (wanted.includes("reorder")) {
    await decoder.rewind(1);
    const order = [...follows.keys()].reverse().concat(0); // the rows backwards, and the first one once more
    await decoder.reorder(order);
    const logits = await decoder.step(order.map((row) => last[row]));
    compare(
      "reorder",
      logits,
      order.map((row) => expected[row]),
    );
  }
}

/**
 * Refuse other tokens than expected.
 *
 * @param {string} name
 * @param {Logits[]} logits
 * @param {number[]} expected
 */
function compare(name, logits, expected) {
  const got = logits.map(likeliest);
  if (String(got) !== String(expected)) {
    throw new Error(`${name}: ${got} in place of ${expected}`);
  }
}
