// What must hold before a model is run by a contract (contract.json).

import { RULES } from "./inputs.js";
import { ARRAYS, typeName } from "./tensors.js";

/** @import { InferenceSession } from "onnxruntime-common" */
/** @import { Contract, ModelFile } from "./types.js" */

const SCHEMA = "kvdoctor/loop/2";
const COUNTS = ["constant", "past", "total", "last", "new", "last-new", "batch", "encoder_input"];
const CARRIES = ["feed-back", "hold", "append", "shift", "drop-oldest", "write"];

/**
 * Refuse a contract that this program does not know, or that the runtime cannot serve: it has fewer element types.
 *
 * @param {unknown} given
 */
export function checkContract(given) {
  const contract = /** @type {Contract} */ (given);
  if (contract?.schema !== SCHEMA) {
    throw new Error(`the contract has schema ${contract?.schema}; this program reads ${SCHEMA}`);
  }
  /** @param {string} name @param {readonly string[]} known @param {string} rule */
  const check = (name, known, rule) => {
    if (!known.includes(rule)) {
      throw new Error(`${name} follows ${rule}, which this program does not know`);
    }
  };
  /** @param {string} name @param {string} dtype */
  const checkType = (name, dtype) => {
    if (!(dtype in ARRAYS)) {
      throw new Error(`${name} has element type ${dtype}, which ONNX Runtime for JavaScript does not have`);
    }
  };
  for (const call of Object.values(contract.calls)) {
    for (const { name, dtype, rule, count } of call?.inputs ?? []) {
      check(name, RULES, rule);
      check(name, COUNTS, count);
      checkType(name, dtype);
    }
    call?.fills.forEach(({ output, carry }) => check(output, CARRIES, carry));
  }
  contract.slots.forEach(({ past, dtype }) => checkType(past, dtype));
  return contract;
}

/**
 * Refuse a model that differs from the one of the contract: in a name, an element type or a fixed size.
 *
 * @param {ModelFile} file
 * @param {InferenceSession} session
 */
export function checkSession({ file, inputs, outputs }, { inputNames, inputMetadata, outputNames }) {
  /** @param {string} difference */
  const refuse = (difference) => {
    throw new Error(`contract.json is of another model: ${file} ${difference}`);
  };
  const expected = Object.keys(inputs);
  expected.filter((name) => !inputNames.includes(name)).forEach((name) => refuse(`has no ${name}`));
  outputs.filter((name) => !outputNames.includes(name)).forEach((name) => refuse(`has no ${name}`));
  inputNames.filter((name) => !expected.includes(name)).forEach((name) => refuse(`has the input ${name} as well`));
  for (const found of inputMetadata) {
    if (found.isTensor) {
      const { name, shape, type } = found;
      const { dtype, dims } = inputs[name];
      const agree = dims.every((dim, axis) => {
        const size = shape[axis]; // the name of an axis in both, or -1 for any size
        return typeof dim === "string" || typeof size === "string" || size < 0 || dim === size;
      });
      if (type !== typeName(dtype) || shape.length !== dims.length || !agree) {
        refuse(`declares ${name} as ${type}[${shape}], not as ${typeName(dtype)}[${dims}]`);
      }
    }
  }
}
