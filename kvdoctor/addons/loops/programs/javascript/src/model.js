// The sessions of a model, and its calls by the contract.

import { checkContract, findDifference } from "./contract.js";
import { makeInput } from "./inputs.js";
import { sample, tensor, useBits } from "./tensors.js";

/** @import { Call, Contract } from "./contract.js" */
/** @import { Moment } from "./inputs.js" */
/** @import { Runtime, Tensor } from "./tensors.js" */
/** @import { InferenceSession } from "onnxruntime-common" */

/** @typedef {import("onnxruntime-common").InferenceSession.SessionOptions} SessionOptions */
/** @typedef {import("onnxruntime-common").InferenceSession.OnnxValueMapType} Values Tensors by their names. */
/** @typedef {import("onnxruntime-common").Tensor.DataType} Data */

/**
 * A tensor in a trace: all of its numbers where there are at most 64, else 64 from the first to the last.
 *
 * @typedef {{ dtype: string, shape: readonly number[], data?: number[], sample?: number[] }} TracedTensor
 */

/**
 * A call: as a line of JSON it is what `kvdoctor step-test MODEL --trace FILE` reads.
 *
 * @typedef {object} TracedCall
 * @property {string} file - The file that was called.
 * @property {Record<string, TracedTensor>} fed - What it was fed.
 * @property {Record<string, TracedTensor>} got - What it returned.
 * @property {string | null} error - The error, where it failed.
 */

/**
 * How to open a model.
 *
 * @typedef {object} OpenOptions
 * @property {SessionOptions} [session] - Execution providers, threads, and more.
 * @property {number} [capacity] - Tokens that buffers of a chosen length have room for; 512 without it.
 * @property {(call: TracedCall) => void} [trace] - Takes every call; tensors are read for it.
 * @property {(value: Tensor) => Promise<Data>} [read] - How a trace reads; `getData` without it.
 */

/** What `encode` made and no slot has, in the cache of a decoder: no name of a model has a NUL. */
export const SOURCE = "\0source";
export const STATES = "\0states";

/** A model that is open: decoders share it. */
export class Model {
  /** @type {Map<string, InferenceSession>} */ #sessions = new Map();

  /**
   * @param {Runtime} ort
   * @param {Contract} contract
   * @param {OpenOptions} options
   */
  constructor(ort, contract, options) {
    const { capacity = 512 } = options;
    if (!Number.isInteger(capacity) || capacity < 1) {
      throw new RangeError(`the capacity is a whole number above 0; got ${capacity}`);
    }
    this.ort = ort;
    this.contract = contract;
    this.options = options;
    /** The length of buffers. */
    this.capacity = contract.capacity_is_chosen ? capacity : (contract.context_limit ?? 1);
    /** The most tokens of a sequence. */
    this.most = Math.min(contract.context_limit ?? Infinity, contract.capacity_is_chosen ? capacity : Infinity);
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
    const model = new Model(ort, checkContract(contract), options);
    /** @param {string} name */
    const path = (name) => `${folder.replace(/\/+$/, "")}/${name}`;
    try {
      for (const file of model.contract.files) {
        // A browser has no folder to look for the weights in.
        const given = ort.env.versions.web !== undefined && file.external.length > 0;
        const externalData = file.external.map((name) => ({ path: name, data: path(name) }));
        const session = await ort.InferenceSession.create(path(file.file), {
          ...options.session,
          ...(given ? { externalData } : {}),
        });
        model.#sessions.set(file.file, session);
        const difference = findDifference(file, session);
        if (difference !== undefined) {
          throw new Error(`contract.json is of another model: ${file.file} ${difference}`);
        }
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
   * @param {ReadonlyMap<string, Tensor>} cache
   * @returns {Promise<Values>}
   */
  async run(call, moment, cache) {
    const { embed } = this.contract.calls;
    const embeds = embed !== null && call.inputs.some(({ rule }) => rule === "embeddings");
    const embedded = embeds ? await this.run(embed, moment, cache) : {};
    try {
      const feeds = this.#feeds(call, moment, cache, embedded);
      return await this.#traced(call, feeds);
    } finally {
      Object.values(embedded).forEach((value) => value.dispose());
    }
  }

  /**
   * What a call is fed.
   *
   * @param {Call} call
   * @param {Moment} moment
   * @param {ReadonlyMap<string, Tensor>} cache
   * @param {Values} embedded
   */
  #feeds(call, moment, cache, embedded) {
    /** @type {Record<string, any>} a value that is missing is an error of the runtime, with its name */
    const feeds = {};
    for (const name of call.pasts) {
      feeds[name] = cache.get(name);
    }
    for (const input of call.inputs) {
      const { name, rule, made } = input;
      if (rule === "embeddings") {
        feeds[name] = embedded[made ?? ""];
      } else if (rule === "encoder-input" || rule === "encoder-states") {
        feeds[name] = cache.get(rule === "encoder-input" ? SOURCE : STATES);
      } else {
        feeds[name] = tensor(this.ort, input.dtype, ...makeInput(input, moment));
      }
    }
    useBits(feeds);
    return feeds;
  }

  /**
   * @param {Call} call
   * @param {Values} feeds
   */
  async #traced(call, feeds) {
    /** @type {Values} */
    let outputs = {};
    /** @type {string | null} */
    let error = null;
    try {
      const session = /** @type {InferenceSession} */ (this.#sessions.get(call.file));
      outputs = await session.run(feeds, call.outputs);
      return outputs;
    } catch (raised) {
      error = String(raised);
      throw raised;
    } finally {
      const { trace } = this.options;
      if (trace !== undefined) {
        trace({
          file: call.file,
          fed: await this.#describe(feeds),
          got: await this.#describe(outputs),
          error,
        });
      }
    }
  }

  /**
   * Tensors as a trace has them.
   *
   * @param {Values} values
   */
  async #describe(values) {
    const { read = (/** @type {Tensor} */ value) => value.getData() } = this.options;
    /** @type {[string, TracedTensor][]} */
    const entries = [];
    for (const [name, value] of Object.entries(values)) {
      const numbers = sample(value.type, await read(value));
      const part = value.size > 64 ? { sample: numbers } : { data: numbers };
      entries.push([name, { dtype: value.type, shape: value.dims, ...part }]);
    }
    return Object.fromEntries(entries);
  }
}
