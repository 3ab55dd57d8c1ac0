// Decodes from the command line: token ids in, token ids out. `--help` lists the options.

import { appendFileSync, existsSync, readFileSync, realpathSync, writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { listSupportedBackends } from "onnxruntime-node";
import { Decoder, likeliest } from "./loop.js";
import { follow, probe, readIds, selfTest } from "./probe.js";

/** @typedef {import("./loop.js").Logits} Logits */
/** @typedef {import("./loop.js").TracedCall} TracedCall */

const USAGE = `Token ids in, token ids out.
  --model FOLDER       folder of the model files
  --prompt IDS         ids with commas; once a sequence
  --most N             the most new tokens (20)
  --stop IDS           ids that end a sequence
  --follow IDS         continue with these ids whatever is likeliest; once a sequence
  --temperature T      0 takes the likeliest token, otherwise sampled (0)
  --top-k K            sample from so many tokens (50)
  --seed N             of the sampling (0)
  --self-test rewind,reorder
                       with --follow: take the last step again, and compare
  --provider NAME      what runs the model (cpu)
  --probe FILE         make the runs that the file describes, in place of a prompt
  --result FILE        with --probe: the file to write (result.jsonl)
`;

/**
 * Decode; tokens go to standard output, a line for each sequence, measurements to standard error.
 */
async function main() {
  const { values: given } = parseArgs({
    options: {
      help: { type: "boolean" },
      model: { type: "string" },
      prompt: { type: "string", multiple: true },
      most: { type: "string", default: "20" },
      stop: { type: "string", default: "" },
      follow: { type: "string", multiple: true },
      temperature: { type: "string", default: "0" },
      "top-k": { type: "string", default: "50" },
      seed: { type: "string", default: "0" },
      "self-test": { type: "string" },
      provider: { type: "string", default: "cpu" },
      probe: { type: "string" },
      result: { type: "string", default: "result.jsonl" },
    },
  });
  if (given.help) {
    console.log(USAGE);
    return;
  }
  const model = required(given.model, "model");
  const session = { executionProviders: [provider(given.provider)] };
  /** @param {((call: TracedCall) => void) | undefined} trace */
  const open = (trace) => Decoder.open(model, { session, trace });

  const { probe: runs, result } = given;
  if (runs !== undefined) {
    const lines = readFileSync(runs, "utf8");
    if (existsSync(result) && realpathSync(result) === realpathSync(runs)) {
      throw new Error("--result is the file of --probe itself");
    }
    writeFileSync(result, "");
    const good = await probe(lines, {
      open,
      write: (line) => appendFileSync(result, line + "\n"),
      report: (name, outcome) => console.log(`${name}: ${outcome}`),
    });
    process.exitCode = good ? 0 : 1;
    return;
  }

  const prompts = required(given.prompt, "prompt").map(readIds);
  const follows = given.follow?.map(readIds);
  const most = whole(given.most, "most");
  const topK = whole(given["top-k"], "top-k");
  const temperature = number(given.temperature, "temperature");
  if (temperature < 0) {
    throw new Error("--temperature is 0 or more");
  }
  const choose =
    temperature > 0 ? sampler(temperature, topK, number(given.seed, "seed")) : likeliest;
  if (given["self-test"] && !follows) {
    throw new Error("--self-test needs tokens to --follow");
  }

  const file = process.env["KVDOCTOR_TRACE"];
  /** @param {TracedCall} call */
  const trace = (call) => file && appendFileSync(file, JSON.stringify(call) + "\n");
  const decoder = await open(file ? trace : undefined);
  const began = performance.now();
  /** @type {number[]} */
  const times = [];
  const onToken = () => times.push(performance.now());
  /** @type {number[][]} */
  let made;
  if (follows) {
    made = await follow(decoder, prompts, follows, onToken);
    if (given["self-test"]) {
      await selfTest(decoder, given["self-test"].split(","), follows, made);
    }
  } else {
    made = await decoder.generate(prompts, { most, stop: readIds(given.stop), choose, onToken });
  }
  for (const row of made) {
    console.log(row.join(","));
  }
  if (times.length > 0) {
    const seconds = (times[times.length - 1] - times[0]) / 1000;
    const rate = seconds > 0 ? (times.length - 1) / seconds : 0;
    const first = (times[0] - began).toFixed(1);
    console.error(
      `first token ${first} ms, ${rate.toFixed(1)} tokens/s, peak memory ${peakMiB()} MiB`,
    );
  }
}

/**
 * The value of an option that must be given.
 *
 * @template T
 * @param {T | undefined} value
 * @param {string} option
 * @returns {T}
 */
function required(value, option) {
  if (value === undefined) {
    throw new Error(`--${option} is missing\n\n${USAGE}`);
  }
  return value;
}

/**
 * The number given for an option.
 *
 * @param {string} text
 * @param {string} option
 * @returns {number}
 */
function number(text, option) {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) {
    throw new Error(`--${option} takes a number, not ${text}`);
  }
  return value;
}

/**
 * The whole number above 0 given for an option.
 *
 * @param {string} text
 * @param {string} option
 * @returns {number}
 */
function whole(text, option) {
  const value = number(text, option);
  if (!Number.isInteger(value) || value < 1) {
    throw new Error(`--${option} takes a whole number above 0, not ${text}`);
  }
  return value;
}

/**
 * An execution provider of this runtime.
 *
 * @param {string} name
 * @returns {string}
 */
function provider(name) {
  const known = listSupportedBackends().map((backend) => backend.name);
  if (!known.includes(name)) {
    throw new Error(`there is no provider ${name}; onnxruntime-node has ${known.join(", ")}`);
  }
  return name;
}

/**
 * A function that picks a token from the `topK` likeliest, by their probabilities at a temperature.
 *
 * @param {number} temperature
 * @param {number} topK
 * @param {number} seed
 * @returns {(logits: Logits) => number}
 */
function sampler(temperature, topK, seed) {
  let state = seed;
  // mulberry32: Math.random takes no seed.
  const random = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  return (logits) => {
    const sorted = logits.slice().sort();
    const best = sorted[sorted.length - 1];
    const least = sorted[Math.max(sorted.length - topK, 0)];
    const weights = Array.from(logits, (value) =>
      value >= least ? Math.exp((value - best) / temperature) : 0,
    );
    let left = random() * weights.reduce((sum, weight) => sum + weight, 0);
    const token = weights.findIndex((weight) => (left -= weight) < 0);
    return token < 0 ? likeliest(logits) : token;
  };
}

/**
 * The largest resident memory of this process so far, in MiB.
 *
 * @returns {number}
 */
function peakMiB() {
  try {
    // On Linux the usage below also counts the program that started this one.
    const status = readFileSync("/proc/self/status", "utf8");
    return Math.floor(Number(/VmHWM:\s*(\d+)/.exec(status)?.[1]) / 1024);
  } catch {
    return Math.floor(process.resourceUsage().maxRSS / 1024);
  }
}

try {
  await main();
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 1;
}
