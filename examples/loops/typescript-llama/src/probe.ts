// Runs with given tokens: those of `--follow`, and those of a probe. Without Node, so that a browser has them too.

import { likeliest } from "./loop.js";
import type { Decoder, Logits, TracedCall } from "./loop.js";

/** What a probe needs of the program around it. */
export interface Host {
  /** Opens the model. */
  readonly open: (trace: (call: TracedCall) => void) => Promise<Decoder>;
  /** Takes a line of the result. */
  readonly write: (line: string) => void;
  /** Takes the outcome of a run. */
  readonly report: (name: string, outcome: string, good: boolean) => void;
}

/** One run of a probe. */
export interface Run {
  /** Its name. */
  readonly name: string;
  /** What each sequence begins with. */
  readonly prompts: number[][];
  /** How each goes on, whatever is likeliest. */
  readonly follows: number[][];
  /** The likeliest token after the prompt and after each further one; -1 where any is right. */
  readonly expected: number[][];
  /** Self-tests. */
  readonly tests: string[];
}

/** Make all runs of a probe, one a line, with one decoder; tells whether all were as expected. */
export async function probe(text: string, host: Host): Promise<boolean> {
  const lines = text.split("\n").filter((line) => line.trim());
  const runs = lines.map(readRun);
  if (runs.length === 0) {
    throw new Error("the probe has no runs");
  }
  let name = "";
  let good = true;
  let decoder: Promise<Decoder> | undefined;
  for (const run of runs) {
    name = run.name;
    let tokens: number[][] = [];
    let error: string | null = null;
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

const OPTIONS = ["--run", "--prompt", "--follow", "--expect", "--self-test"];

/** A run as a line of the probe describes it: options and their values, with single spaces. */
function readRun(line: string): Run {
  const words = line.trim().split(" ");
  const given: Map<string, string[]> = new Map(OPTIONS.map((option) => [option, []]));
  for (let at = 0; at < words.length; at += 2) {
    const values = given.get(words[at]);
    if (values === undefined || at + 1 === words.length) {
      throw new Error(`a run takes values of ${OPTIONS.join(", ")}; got ${words[at]}`);
    }
    values.push(words[at + 1]);
  }
  const all = (option: string) => given.get(option) ?? [];
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
    tests: all("--self-test").flatMap((names) => names.split(",")),
  };
}

/** Make one run, whatever the one before left in the decoder. */
async function decode(decoder: Decoder, run: Run): Promise<number[][]> {
  decoder.reset();
  const made = await follow(decoder, run.prompts, run.follows);
  if (run.tests.length > 0) {
    await selfTest(decoder, run.tests, run.follows, made);
  }
  return made;
}

/** The first place where other tokens were likeliest than expected. */
function difference(tokens: number[][], expected: number[][]): string | null {
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

/** Integers with commas between them. */
export function readIds(text: string): number[] {
  const parts = text.split(",").filter(Boolean);
  const numbers = parts.map(Number);
  // Number takes 5.0, 0x5 and 1e1 as well, which are no ids.
  if (!parts.every((part) => /^\s*-?\d+\s*$/.test(part)) || !numbers.every(Number.isSafeInteger)) {
    throw new Error(`not integers with commas: ${text}`);
  }
  return numbers;
}

/** The likeliest token after the prompt and after each given one, whatever was likeliest before. */
export async function follow(
  decoder: Decoder,
  prompts: number[][],
  follows: number[][],
  onToken?: () => void,
): Promise<number[][]> {
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
 */
export async function selfTest(
  decoder: Decoder,
  wanted: string[],
  follows: number[][],
  made: number[][],
): Promise<void> {
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

/** Refuse other tokens than expected. */
function compare(name: string, logits: Logits[], expected: number[]): void {
  const got = logits.map(likeliest);
  if (String(got) !== String(expected)) {
    throw new Error(`${name}: ${got} in place of ${expected}`);
  }
}
