// The sessions of a model, and its calls by the contract.

import { checkContract, checkSession } from "./contract.js";
import { makeInput } from "./inputs.js";
import { sample, tensor, typeName, useBits } from "./tensors.js";

/** @import { InferenceSession } from "onnxruntime-common" */
/** @import { Runtime, Tensor } from "./tensors.js" */
/** @import { Call, Contract, Moment, OpenOptions, TracedTensor, Values } from "./types.js" */

/** The source in the cache of a decoder: no name of a model has a NUL. */
export const SOURCE = "\0source";

/** A model that is open: decoders share it. */
export class Model {
  /** @type {Map<string, InferenceSession>} */ #sessions = new Map();

  /** @param {Runtime} ort @param {Contract} contract @param {OpenOptions} options */
  constructor(ort, contract, options) {
    const { capacity = 512 } = options;
    if (!Number.isInteger(capacity) || capacity < 1) {
      throw new RangeError(`the capacity is a whole number above 0; got ${capacity}`);
    }
    this.ort = ort;
    this.contract = contract;
    this.options = options;
    const limit = contract.context_limit;
    /** The length of buffers. */
    this.capacity = contract.capacity_is_chosen ? capacity : (limit ?? 1);
    /** The most tokens of a sequence. */
    this.most = Math.min(limit ?? Infinity, contract.capacity_is_chosen ? capacity : Infinity);
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
        const more = given ? { externalData } : {};
        const session = await ort.InferenceSession.create(path(file.file), { ...options.session, ...more });
        model.#sessions.set(file.file, session);
        checkSession(file, session);
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
    /** @type {Record<string, any>} a value that is missing is an error of the runtime, with its name */
    const feeds = Object.fromEntries(call.pasts.map((name) => [name, cache.get(name)]));
    for (const input of call.inputs) {
      const { name, rule, made, dtype } = input;
      if (rule === "embeddings") {
        feeds[name] = embedded[made ?? ""];
      } else if (rule === "encoder-input" || rule === "encoder-states") {
        feeds[name] = cache.get(made ?? SOURCE);
      } else {
        feeds[name] = tensor(this.ort, typeName(dtype), ...makeInput(input, moment));
      }
    }
    useBits(feeds);
    const session = /** @type {InferenceSession} */ (this.#sessions.get(call.file));
    try {
      const outputs = await session.run(feeds, call.outputs);
      await this.#note(call.file, feeds, outputs, null);
      return outputs;
    } catch (error) {
      await this.#note(call.file, feeds, {}, String(error));
      throw error;
    } finally {
      Object.values(embedded).forEach((value) => value.dispose());
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
