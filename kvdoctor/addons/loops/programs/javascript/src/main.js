// Decodes from the command line: token ids in, token ids out. `--help` lists the options.

import { appendFileSync, existsSync, readFileSync, realpathSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import * as ort from "onnxruntime-node";
import { check } from "./check.js";
import { Decoder } from "./decoder.js";
import { floatsOf, playRuns } from "./runs.js";

/** @import { OpenOptions } from "./types.js" */

const HERE = fileURLToPath(new URL("..", import.meta.url));
const USAGE = `Token ids in, token ids out.
  --model FOLDER        folder of the model files
  --prompt IDS          ids with commas; once a sequence
  --source IDS|FILE     for the encoder: ids, once a sequence; or a file of float32, little endian
  --source-shape DIMS   its shape with commas
  --most N              the most new tokens (20)
  --stop IDS            ids that end a sequence (those of the contract)
  --temperature T       0 takes the likeliest token, otherwise sampled (0)
  --top-k K             sample from so many of the likeliest (50)
  --top-p P, --min-p P, --repetition-penalty R, --seed N
                        of the sampling as well
  --capacity N          room in tokens of a cache of fixed length (512)
  --provider NAME       what runs the model (cpu)
  --threads N           of the runtime
  --contract FILE       (contract.json of this project)
  --record FILE         play the runs, and write a trace for kvdoctor step-test MODEL --trace FILE
  --runs FILE           (vectors.json of this project)
`;

/** Decode; tokens go to standard output, a line for each sequence. */
async function main() {
  const multiple = ["prompt", "source"];
  const names = [...USAGE.matchAll(/--([a-z-]+)/g)].map(([, name]) => name);
  const options = names.map((name) => [name, { type: "string", multiple: multiple.includes(name) }]);
  const { values } = parseArgs({ options: { ...Object.fromEntries(options), help: { type: "boolean" } } });
  const given = /** @type {Record<string, any>} */ (values);
  if (given["help"]) {
    console.log(USAGE);
    return;
  }
  /** @param {string} name */
  const required = (name) => {
    check(given[name] !== undefined, `--${name} is missing\n\n${USAGE}`);
    return given[name];
  };
  /** @param {string} name @param {number} least @param {number} [otherwise] */
  const number = (name, least, otherwise) => {
    const text = given[name] ?? String(otherwise);
    const value = Number(text);
    check(
      text.trim() !== "" && Number.isFinite(value) && value >= least,
      `--${name} takes a number, ${least} or more, not ${text}`,
    );
    return value;
  };
  const model = required("model");
  const contract = JSON.parse(readFileSync(given["contract"] ?? join(HERE, "contract.json"), "utf8"));
  const session = {
    executionProviders: [provider(given["provider"] ?? "cpu")],
    intraOpNumThreads: number("threads", 0, 0),
  };
  const capacity = number("capacity", 1, 512);
  /** @param {OpenOptions["trace"]} [trace] */
  const open = (trace) => Decoder.open(ort, model, contract, { capacity, session, trace });

  if (given["record"] !== undefined) {
    const [runs, record] = [given["runs"] ?? join(HERE, "vectors.json"), given["record"]];
    const vectors = JSON.parse(readFileSync(runs, "utf8"));
    check(!existsSync(record) || realpathSync(record) !== realpathSync(runs), "--record is the file of --runs itself");
    writeFileSync(record, "");
    const good = await playRuns(vectors, {
      open,
      read: async (file) => readFileSync(join(dirname(runs), file)),
      write: (line) => appendFileSync(record, line + "\n"),
      report: (name, outcome) => console.log(`${name}: ${outcome}`),
    });
    process.exitCode = good ? 0 : 1;
    return;
  }

  const prompts = required("prompt").map(readIds);
  const decoding = {
    most: number("most", 1, 20),
    stop: given["stop"] === undefined ? undefined : readIds(given["stop"]),
    temperature: number("temperature", 0, 0),
    topK: number("top-k", 1, 50),
    topP: number("top-p", 0, 1),
    minP: number("min-p", 0, 0),
    repetitionPenalty: number("repetition-penalty", 0, 1),
    seed: number("seed", 0, 0),
  };
  const decoder = await open();
  if (contract.source !== null) {
    const sources = required("source");
    const floats = () => floatsOf(readFileSync(sources[0]), readIds(required("source-shape")));
    await decoder.encode(contract.source.dtype.startsWith("int") ? sources.map(readIds) : floats());
  }
  for (const row of await decoder.generate(prompts, decoding)) {
    console.log(row.join(","));
  }
}

/** Integers with commas between them. @param {string} text */
function readIds(text) {
  const parts = text.split(",").filter(Boolean);
  const numbers = parts.map(Number);
  // Number takes 5.0, 0x5 and 1e1 as well, which are no ids.
  check(
    parts.every((part) => /^\s*-?\d+\s*$/.test(part)) && numbers.every(Number.isSafeInteger),
    `not integers with commas: ${text}`,
  );
  return numbers;
}

/** An execution provider of this runtime. @param {string} name */
function provider(name) {
  const known = ort.listSupportedBackends().map((backend) => backend.name);
  check(known.includes(name), `there is no provider ${name}; onnxruntime-node has ${known.join(", ")}`);
  return name;
}

try {
  await main();
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 1;
}
