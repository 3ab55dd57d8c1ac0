// Decodes from the command line: token ids in, token ids out. `--help` lists the options.

import { appendFileSync, existsSync, readFileSync, realpathSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import * as ort from "onnxruntime-node";
import { Decoder } from "./decoder.js";
import { floatsOf, followTokens, playRuns, selfTest } from "./runs.js";

/** @import { TracedCall } from "./decoder.js" */

const HERE = fileURLToPath(new URL("..", import.meta.url));
const USAGE = `Token ids in, token ids out.
  --model FOLDER        folder of the model files
  --prompt IDS          ids with commas; once a sequence
  --source IDS|FILE     for the encoder: ids, once a sequence; or a file of float32, little endian
  --source-shape DIMS   its shape with commas
  --most N              the most new tokens (20)
  --stop IDS            ids that end a sequence (those of the contract)
  --follow IDS          continue with these ids whatever is likeliest; once a sequence
  --self-test NAMES     rewind, reorder; with --follow: take the last step again, and compare
  --temperature T       0 takes the likeliest token, otherwise sampled (0)
  --top-k K             sample from so many of the likeliest (50)
  --top-p P, --min-p P, --repetition-penalty R, --seed N
                        of the sampling as well
  --capacity N          room in tokens of a cache of fixed length (512)
  --provider NAME       what runs the model (cpu)
  --threads N           of the runtime
  --contract FILE       (contract.json of this project)
  --record FILE         write what is fed and got, for kvdoctor step-test MODEL --trace FILE:
                        of the prompt, or without one of the runs in a file
  --runs FILE           (vectors.json of this project)
`;

/** Decode; tokens go to standard output, a line for each sequence, measurements to standard error. */
async function main() {
  /** @type {Record<string, { type: "string", multiple?: boolean } | { type: "boolean" }>} */
  const options = Object.fromEntries([...USAGE.matchAll(/--([a-z-]+)/g)].map(([, name]) => [name, { type: "string" }]));
  Object.assign(options, { help: { type: "boolean" }, ...several("prompt", "source", "follow") });
  const given = /** @type {Record<string, any>} */ (parseArgs({ options }).values);
  if (given["help"]) {
    console.log(USAGE);
    return;
  }
  /** @param {string} name */
  const required = (name) => {
    if (given[name] === undefined) {
      throw new Error(`--${name} is missing\n\n${USAGE}`);
    }
    return given[name];
  };
  /** @param {string} name @param {number} least */
  const number = (name, least = -Infinity) => {
    const value = Number(given[name] ?? NaN);
    if (given[name] !== undefined && !(given[name].trim() !== "" && Number.isFinite(value) && value >= least)) {
      throw new Error(`--${name} takes a number${least > -Infinity ? `, ${least} or more` : ""}, not ${given[name]}`);
    }
    return given[name] === undefined ? undefined : value;
  };
  const model = required("model");
  const contract = JSON.parse(readFileSync(given["contract"] ?? join(HERE, "contract.json"), "utf8"));
  const session = {
    executionProviders: [provider(given["provider"] ?? "cpu")],
    intraOpNumThreads: number("threads", 0) ?? 0,
  };
  const capacity = number("capacity", 1);
  const record = given["record"] ?? (given["prompt"] && process.env["KVDOCTOR_TRACE"]);
  /** @param {((call: TracedCall) => void) | undefined} trace */
  const open = (trace) => Decoder.open(ort, model, contract, { capacity, session, trace });
  /** @param {string} line */
  const write = (line) => appendFileSync(record, line + "\n");

  if (record !== undefined && (given["prompt"] === undefined || given["runs"] !== undefined)) {
    const runs = given["runs"] ?? join(HERE, "vectors.json");
    const vectors = JSON.parse(readFileSync(runs, "utf8"));
    begin(record, runs);
    const read = async (/** @type {string} */ file) => readFileSync(join(dirname(runs), file));
    /** @type {import("./runs.js").Host["report"]} */
    const report = (name, outcome) => console.log(`${name}: ${outcome}`);
    const good = await playRuns(vectors, { open, read, write, report });
    process.exitCode = good ? 0 : 1;
    return;
  }

  const prompts = required("prompt").map(readIds);
  const sampling = {
    temperature: number("temperature", 0),
    topK: number("top-k", 1) ?? 50,
    topP: number("top-p", 0),
    minP: number("min-p", 0),
    repetitionPenalty: number("repetition-penalty", 0),
    seed: number("seed"),
  };
  const decoding = {
    most: number("most", 1),
    stop: given["stop"] === undefined ? undefined : readIds(given["stop"]),
  };
  if (record !== undefined) {
    begin(record);
  }
  const decoder = await open(record && ((call) => write(JSON.stringify(call))));
  const began = performance.now();
  if (contract.source !== null) {
    const ids = /^int/.test(contract.source.dtype);
    const sources = required("source");
    const floats = () => floatsOf(readFileSync(sources[0]), readIds(required("source-shape")));
    await decoder.encode(ids ? sources.map(readIds) : floats());
  }
  /** @type {number[]} */
  const times = [];
  const onToken = () => times.push(performance.now());
  /** @type {number[][]} */
  let made = prompts.map(() => []);
  if (given["follow"]) {
    const follow = given["follow"].map(readIds);
    made = await followTokens(decoder, prompts, follow, onToken);
    for (const test of given["self-test"]?.split(",") ?? []) {
      await selfTest(decoder, test, follow, made);
    }
  } else {
    for await (const { sequence, token } of decoder.stream(prompts, { ...decoding, ...sampling })) {
      made[sequence].push(token);
      onToken();
    }
  }
  made.forEach((row) => console.log(row.join(",")));
  const seconds = (times[times.length - 1] - times[0]) / 1000;
  const rate = (seconds > 0 ? (times.length - 1) / seconds : 0).toFixed(1);
  const first = (times[0] - began).toFixed(1);
  console.error(`first token ${first} ms, ${rate} tokens/s, peak memory ${peakMiB()} MiB`);
}

/** @param {string[]} names */
function several(...names) {
  return Object.fromEntries(names.map((name) => [name, { type: "string", multiple: true }]));
}

/**
 * Begin the file of a trace, which is no other file of the call.
 *
 * @param {string} file
 * @param {string} [runs]
 */
function begin(file, runs) {
  if (runs !== undefined && existsSync(file) && realpathSync(file) === realpathSync(runs)) {
    throw new Error("--record is the file of --runs itself");
  }
  writeFileSync(file, "");
}

/**
 * Integers with commas between them.
 *
 * @param {string} text
 */
function readIds(text) {
  const parts = text.split(",").filter(Boolean);
  const numbers = parts.map(Number);
  // Number takes 5.0, 0x5 and 1e1 as well, which are no ids.
  if (!parts.every((part) => /^\s*-?\d+\s*$/.test(part)) || !numbers.every(Number.isSafeInteger)) {
    throw new Error(`not integers with commas: ${text}`);
  }
  return numbers;
}

/**
 * An execution provider of this runtime.
 *
 * @param {string} name
 */
function provider(name) {
  const known = ort.listSupportedBackends().map((backend) => backend.name);
  if (!known.includes(name)) {
    throw new Error(`there is no provider ${name}; onnxruntime-node has ${known.join(", ")}`);
  }
  return name;
}

/** The largest resident memory of this process so far, in MiB. */
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
