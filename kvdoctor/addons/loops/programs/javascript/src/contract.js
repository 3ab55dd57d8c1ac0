// The contract of a decode loop (contract.json): its types, and what must hold before a model is run by it.
// What each field means is described in README.md and in docs/loops.md of kvdoctor.

import { NUMBERS, RULES } from "./inputs.js";
import { ARRAYS, typeName } from "./tensors.js";

/** @import { InferenceSession } from "onnxruntime-common" */

/** @typedef {number | string} Dim A size, or the name of the axis that has it. */

/**
 * One input of a call that is not the cache.
 *
 * @typedef {{
 *   name: string, dtype: string, dims: readonly Dim[], rule: string, count: string,
 *   value: number, shown: number, hidden: number, from_right: boolean, made: string | null,
 * }} Input
 */

/**
 * One kind of call.
 *
 * @typedef {{
 *   file: string, inputs: readonly Input[], pasts: readonly string[], outputs: readonly string[],
 *   logits: string | null, states: string | null,
 * }} Call
 */

/**
 * One tensor of the cache.
 *
 * @typedef {{
 *   past: string, present: string | null, made: string | null, by_encoder: boolean, dtype: string,
 *   dims: readonly Dim[], carry: string, batch_axis: number | null, length_axis: number | null,
 *   counts_states: boolean, rewinds: string, first_length: number, heads: number, fed_zeros: boolean,
 * }} Slot
 */

/**
 * What a session of a file must have.
 *
 * @typedef {{
 *   file: string, external: readonly string[], outputs: readonly string[],
 *   inputs: Readonly<Record<string, { dtype: string, dims: readonly Dim[] }>>,
 * }} ModelFile
 */

/**
 * Token ids of the model's configs.
 *
 * @typedef {{
 *   start: readonly number[], end: readonly number[], padding: number | null, suppress: readonly number[],
 *   begin_suppress: readonly number[], forced: readonly (readonly [position: number, id: number])[],
 * }} Generation
 */

/**
 * All that a loop does.
 *
 * @typedef {{
 *   schema: string, model: string, files: readonly ModelFile[],
 *   calls: { encode: Call | null, embed: Call | null, prefill: Call, decode: Call },
 *   slots: readonly Slot[], source: Input | null, vocabulary: number | null, context_limit: number | null,
 *   one_token: boolean, batch: number | null, capacity_is_chosen: boolean, pads: boolean, chunks: boolean,
 *   rewinds: boolean, reorders: boolean, placeholders?: readonly number[], generation: Generation,
 * }} Contract
 */

export const SCHEMA = "kvdoctor/loop/2";
const CARRIES = ["feed-back", "hold", "append", "shift", "drop-oldest", "write"];

/**
 * Refuse a contract that this program does not know, or that the runtime cannot serve.
 *
 * @param {unknown} given
 */
export function checkContract(given) {
  const contract = /** @type {Contract} */ (given);
  if (contract?.schema !== SCHEMA) {
    throw new Error(`the contract has schema ${contract?.schema}; this program reads ${SCHEMA}`);
  }
  for (const call of Object.values(contract.calls)) {
    for (const { name, dtype, rule, count } of call?.inputs ?? []) {
      if (!RULES.includes(rule) || !NUMBERS.includes(count)) {
        const unknown = RULES.includes(rule) ? count : rule;
        throw new Error(`the input ${name} follows ${unknown}, which this program does not know`);
      }
      checkTensor(name, dtype);
    }
    call?.outputs.forEach((name) => checkTensor(name));
  }
  for (const { past, dtype, carry } of contract.slots) {
    checkTensor(past, dtype);
    if (!CARRIES.includes(carry)) {
      throw new Error(`the cache ${past} follows ${carry}, which this program does not know`);
    }
  }
  return contract;
}

/**
 * Refuse what the runtime loses: it has fewer element types, takes names as C strings, and returns plain objects.
 *
 * @param {string} name
 * @param {string} [dtype]
 */
function checkTensor(name, dtype = "float") {
  if (!(dtype in ARRAYS)) {
    throw new Error(`${name} has element type ${dtype}, which ONNX Runtime for JavaScript does not have`);
  }
  if (name === "__proto__" || name.includes("\0")) {
    throw new Error(`the name ${JSON.stringify(name)} does not get through ONNX Runtime for JavaScript`);
  }
}

/**
 * How a model differs from the one of the contract: in a name, an element type or a fixed size.
 *
 * @param {ModelFile} file
 * @param {InferenceSession} session
 * @returns {string | undefined}
 */
export function findDifference(file, session) {
  const { inputNames, inputMetadata, outputNames } = session;
  const inputs = Object.keys(file.inputs);
  const missing =
    inputs.find((name) => !inputNames.includes(name)) ?? file.outputs.find((name) => !outputNames.includes(name));
  const extra = inputNames.find((name) => !inputs.includes(name));
  if (missing !== undefined || extra !== undefined) {
    return missing !== undefined ? `has no ${missing}` : `has the input ${extra} as well`;
  }
  for (const [at, name] of inputNames.entries()) {
    const { dtype, dims } = file.inputs[name];
    const found = inputMetadata[at];
    if (found.isTensor) {
      const { shape, type } = found;
      const fits = shape.length === dims.length && dims.every((dim, axis) => agree(dim, shape[axis]));
      if (type !== typeName(dtype) || !fits) {
        return `declares ${name} as ${type}[${shape}], not as ${typeName(dtype)}[${dims}]`;
      }
    }
  }
  return undefined;
}

/**
 * Whether a size of the contract can be that of a model: each may be the name of an axis.
 *
 * @param {Dim} expected
 * @param {Dim} found
 */
function agree(expected, found) {
  return typeof expected === "string" || typeof found === "string" || found < 0 || expected === found;
}
