// Decodes from the command line: token ids in, token ids out. `--help` lists the options.

import { appendFileSync, readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { Decoder, likeliest } from "./loop.js";
import type { Logits } from "./loop.js";

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
`;

/**
 * Decode; tokens go to standard output, a line for each sequence, measurements to standard error.
 */
async function main(): Promise<void> {
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
      "self-test": { type: "string", default: "" },
    },
  });
  if (given.help) {
    console.log(USAGE);
    return;
  }
  const prompts = required(given.prompt, "prompt").map(ids);
  const temperature = number(given.temperature, "temperature");
  const choose =
    temperature > 0
      ? sampler(temperature, number(given["top-k"], "top-k"), number(given.seed, "seed"))
      : likeliest;
  const most = number(given.most, "most");
  const stop = ids(given.stop);
  const follows = given.follow?.map(ids);

  const file = process.env["KVDOCTOR_TRACE"];
  const trace = file ? (line: string) => appendFileSync(file, line + "\n") : undefined;
  const decoder = await Decoder.open(required(given.model, "model"), { trace });
  const began = performance.now();
  const times: number[] = [];
  const onToken = () => times.push(performance.now());
  let made: number[][];
  if (follows) {
    made = await follow(decoder, prompts, follows, onToken);
    if (given["self-test"]) {
      await selfTest(decoder, given["self-test"].split(","), follows, made);
    }
  } else {
    made = await decoder.generate(prompts, { most, stop, choose, onToken });
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

/** The value of an option that must be given. */
function required<T>(value: T | undefined, option: string): T {
  if (value === undefined) {
    throw new Error(`--${option} is missing\n\n${USAGE}`);
  }
  return value;
}

/** Integers with commas between them. */
function ids(text: string): number[] {
  const numbers = text.split(",").filter(Boolean).map(Number);
  if (!numbers.every(Number.isSafeInteger)) {
    throw new Error(`not integers with commas: ${text}`);
  }
  return numbers;
}

/** The number given for an option. */
function number(text: string, option: string): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) {
    throw new Error(`--${option} takes a number, not ${text}`);
  }
  return value;
}

/** The likeliest token after the prompt and after each given one, whatever was likeliest before. */
async function follow(
  decoder: Decoder,
  prompts: number[][],
  follows: number[][],
  onToken: () => void,
): Promise<number[][]> {
  const count = follows[0].length;
  if (follows.length !== prompts.length || follows.some((row) => row.length !== count)) {
    throw new Error("--follow takes the same number of ids for each prompt");
  }
  const made = (await decoder.prefill(prompts)).map((logits) => [likeliest(logits)]);
  onToken();
  for (let position = 0; position < count; position++) {
    const logits = await decoder.step(follows.map((row) => [row[position]]));
    onToken();
    logits.forEach((row, sequence) => made[sequence].push(likeliest(row)));
  }
  return made;
}

/**
 * Take the last step again after going back, and after changing rows: the tokens must be the same.
 */
async function selfTest(
  decoder: Decoder,
  wanted: string[],
  follows: number[][],
  made: number[][],
): Promise<void> {
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

/** End the program where other tokens are likeliest. */
function compare(name: string, logits: Logits[], expected: number[]): void {
  const got = logits.map(likeliest);
  if (String(got) !== String(expected)) {
    throw new Error(`${name}: ${got} in place of ${expected}`);
  }
}

/**
 * A function that picks a token from the `topK` likeliest, by their probabilities at a temperature.
 */
function sampler(temperature: number, topK: number, seed: number): (logits: Logits) => number {
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
    const least = sorted[Math.max(sorted.length - Math.max(topK, 1), 0)];
    const weights = Array.from(logits, (value) =>
      value >= least ? Math.exp((value - best) / temperature) : 0,
    );
    let left = random() * weights.reduce((sum, weight) => sum + weight, 0);
    const token = weights.findIndex((weight) => (left -= weight) < 0);
    return token < 0 ? likeliest(logits) : token;
  };
}

/** The largest resident memory of this process so far, in MiB. */
function peakMiB(): number {
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
