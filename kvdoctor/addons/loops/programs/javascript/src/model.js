// The sessions of a model, and its calls by the contract.

import { check } from "./check.js";
import { makeInput, sample, typeName, useBits } from "./tensors.js";

/** @import { InferenceSession } from "onnxruntime-common" */
/** @import { Cache } from "./cache.js" */
/** @import { Runtime, Tensor } from "./tensors.js" */
/** @import { Call, Contract, ModelFile, Moment, OpenOptions, TracedTensor, Values } from "./types.js" */

const SCHEMA = "kvdoctor/loop/4";

/** A model that is open: decoders share it. */
export class Model {
  /** @type {Map<string, InferenceSession>} */ #sessions = new Map();

  /** @param {Runtime} ort @param {Contract} contract @param {OpenOptions} options */
  constructor(ort, contract, options) {
    const { capacity = 512 } = options;
    check(contract?.schema === SCHEMA, `the contract has schema ${contract?.schema}; this program reads ${SCHEMA}`);
    check(Number.isInteger(capacity) && capacity >= 1, `the capacity is a whole number above 0; got ${capacity}`);
    this.ort = ort;
    this.contract = contract;
    this.options = options;
    const { capacity_is_chosen: chosen, context_limit: limit, longest } = contract;
    /** The length of buffers. */
    this.capacity = chosen ? capacity : limit;
    /** The most tokens of a sequence. */
    this.most = chosen ? Math.min(longest, capacity) : longest;
  }

  /**
   * Open the files of a model, and compare them with the contract.
   *
   * @param {Runtime} ort
   * @param {string} folder
   * @param {unknown} contract
   * @param {OpenOptions} options
   */
  static async open(ort, folder, contract, options) {
    const model = new Model(ort, /** @type {Contract} */ (contract), options);
    /** @param {string} name */
    const path = (name) => `${folder.replace(/\/+$/, "")}/${name}`;
    try {
      for (const file of model.contract.files) {
        // A browser has no folder to look for the weights in.
        const given = ort.env.versions.web !== undefined && file.external.length > 0;
        const externalData = file.external.map((name) => ({ path: name, data: path(name) }));
        const more = given ? { externalData } : {};
        const session = await ort.InferenceSession.create(path(file.file), { ...options.session, ...more });
        model.#sessions.set(file.file, session);
        compare(file, session);
      }
    } catch (error) {
      await model.close();
      throw error;
    }
    return model;
  }

  /** Give back the sessions. */
  async close() {
    await Promise.all([...this.#sessions.values()].map((session) => session.release()));
  }

  /**
   * Run one call, and note it where a trace is wanted.
   *
   * @param {Call} call
   * @param {Moment} moment
   * @param {Cache} cache
   */
  async run({ file, values, made, outputs, sizes }, moment, cache) {
    for (const [name, { value, axis }] of Object.entries(sizes)) {
      moment.sizes[name] = cache.get(value)?.dims[axis] ?? 0;
    }
    const feeds = Object.fromEntries([
      ...Object.entries(values).map(([name, value]) => [name, cache.get(value)]),
      ...made.map((input) => [input.name, makeInput(this.ort, input, moment)]),
    ]);
    useBits(feeds);
    const session = /** @type {InferenceSession} */ (this.#sessions.get(file));
    try {
      const got = await session.run(feeds, outputs);
      await this.#note(file, feeds, got, null);
      return got;
    } catch (error) {
      await this.#note(file, feeds, {}, String(error));
      throw error;
    }
  }

  /** @param {string} file @param {Values} fed @param {Values} got @param {string | null} error */
  async #note(file, fed, got, error) {
    const { trace } = this.options;
    trace?.({ file, fed: await this.#describe(fed), got: await this.#describe(got), error });
  }

  /** Tensors as a trace has them. @param {Values} values */
  async #describe(values) {
    const { read = (/** @type {Tensor} */ value) => value.getData() } = this.options;
    /** @type {Record<string, TracedTensor>} */
    const described = {};
    for (const [name, value] of Object.entries(values)) {
      const numbers = sample(value.type, await read(value));
      const part = value.size > 64 ? { sample: numbers } : { data: numbers };
      described[name] = { dtype: value.type, shape: value.dims, ...part };
    }
    return described;
  }
}

/**
 * Refuse a model that differs from the one of the contract: in a name, an element type or a fixed size.
 *
 * @param {ModelFile} file
 * @param {InferenceSession} session
 */
function compare({ file, inputs, outputs }, { inputNames, inputMetadata, outputNames }) {
  const of = `contract.json is of another model: ${file}`;
  const [expected, found] = [
    [...Object.keys(inputs), ...outputs],
    [...inputNames, ...outputNames],
  ];
  const missing = expected.find((name) => !found.includes(name));
  check(missing === undefined, `${of} has no ${missing}`);
  for (const port of inputMetadata) {
    const due = inputs[port.name];
    check(due !== undefined, `${of} has the input ${port.name} as well`);
    if (port.isTensor) {
      const { name, shape, type } = port;
      // A size is the name of an axis or -1 where it is free.
      const agree = shape.every((size, axis) => typeof size === "string" || size < 0 || size === due.shape[axis]);
      const fits = type === typeName(due.dtype) && (shape.length === due.shape.length || shape.length === 0);
      check(fits && agree, `${of} declares ${name} as ${type}[${shape}], not as ${typeName(due.dtype)}[${due.shape}]`);
    }
  }
}
