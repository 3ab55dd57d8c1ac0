// Decodes from the command line: token ids in, token ids out.

import { appendFileSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import * as ort from "onnxruntime-node";
import { check } from "./check.js";
import { Decoder } from "./decoder.js";
import { make, playRuns } from "./runs.js";

const HERE = fileURLToPath(new URL("..", import.meta.url));
const USAGE = `Token ids in, token ids out.
  --model FOLDER    folder of the model files
  --provider NAME   what runs the model (cpu)
  --calls JSON      calls: [{"call": "generate", "rows": [[5, 6, 7]], "most": 20}]
  --runs FILE       without --calls: runs to play (vectors.json of this project)
  --record FILE     write a trace for kvdoctor step-test MODEL --trace FILE
  --contract FILE   (contract.json of this project)`;

/** Make the calls, whose tokens go to standard output, a line for each sequence; or play the runs. */
async function main() {
  const text = /** @type {const} */ ({ type: "string" });
  const { values: given } = parseArgs({
    options: {
      help: { type: "boolean" },
      model: text,
      provider: { ...text, default: "cpu" },
      calls: text,
      runs: { ...text, default: join(HERE, "vectors.json") },
      record: text,
      contract: { ...text, default: join(HERE, "contract.json") },
    },
  });
  const { model, provider, calls, runs, record } = given;
  if (given.help || model === undefined) {
    console.log(USAGE);
    process.exitCode = given.help ? 0 : 2;
    return;
  }
  const known = ort.listSupportedBackends().map((backend) => backend.name);
  check(known.includes(provider), `there is no provider ${provider}; onnxruntime-node has ${known.join(", ")}`);
  const contract = JSON.parse(readFileSync(given.contract, "utf8"));
  const host = {
    /** @param {import("./types.js").OpenOptions["trace"]} trace */
    open: (trace) => Decoder.open(ort, model, contract, { session: { executionProviders: [provider] }, trace }),
    /** @param {string} file */
    read: async (file) => readFileSync(join(calls === undefined ? dirname(runs) : "", file)),
    /** @param {string} line */
    write: (line) => record !== undefined && appendFileSync(record, line + "\n"),
    /** @param {string} name @param {string} outcome */
    report: (name, outcome) => console.log(`${name}: ${outcome}`),
  };
  if (record !== undefined) {
    writeFileSync(record, "");
  }
  if (calls === undefined) {
    process.exitCode = (await playRuns(JSON.parse(readFileSync(runs, "utf8")), host)) ? 0 : 1;
    return;
  }
  const decoder = await host.open((call) => host.write(JSON.stringify(call)));
  for (const call of JSON.parse(calls)) {
    for (const row of await make(decoder, call, host)) {
      console.log(row.join(","));
    }
  }
}

try {
  await main();
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 1;
}
