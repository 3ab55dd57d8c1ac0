/**
 * The decode loop of llama-gqa (layout optimum-decoder-only), written by kvdoctor 0.1.0.
 *
 *     const decoder = await Decoder.open("path/to/the/model");
 *     const tokens = await decoder.generate([[5, 6, 7]], { most: 20 });
 *
 * All names, types and sizes are those of the cache contract of this model; README.md says it in words.
 * In a browser, let an import map or the bundler resolve "onnxruntime-node" to onnxruntime-web.
 */

import { InferenceSession, Tensor } from "onnxruntime-node";

/** @typedef {readonly (readonly number[])[]} Tokens Token ids, a list for each sequence of the batch. */
/** @typedef {Float32Array} Logits What each entry of the vocabulary scores, of one sequence. */
/** @typedef {InferenceSession.OnnxValueMapType} Values */
/** @typedef {readonly [value: Tensor, from: number, to: number]} Piece Part of a tensor along an axis. */
/** @typedef {"batch" | "past"} Axis An axis whose size is known only when the loop runs. */

const DECODER = "model.onnx";
/** The most tokens that a sequence may have. */
const MOST_TOKENS = 64;
/** Entries of the vocabulary: token ids are below it. */
const VOCABULARY = 128;

/**
 * One tensor of the cache.
 *
 * @typedef {object} Slot
 * @property {string} past - The input that it is fed to.
 * @property {string | null} made - The output that first fills it, of the first call.
 * @property {string | null} present - The output of each later call that carries it on; null where the first value is kept.
 * @property {readonly (number | Axis)[]} shape - Its sizes.
 * @property {number} batchAxis - The axis of the sequences.
 * @property {number} lengthAxis - The axis of the tokens.
 */

/** @type {readonly Slot[]} */
const CACHE = [
  {
    past: "past_key_values.0.key",
    made: "present.0.key",
    present: "present.0.key",
    shape: ["batch", 2, "past", 8],
    batchAxis: 0,
    lengthAxis: 2,
  },
  {
    past: "past_key_values.0.value",
    made: "present.0.value",
    present: "present.0.value",
    shape: ["batch", 2, "past", 8],
    batchAxis: 0,
    lengthAxis: 2,
  },
  {
    past: "past_key_values.1.key",
    made: "present.1.key",
    present: "present.1.key",
    shape: ["batch", 2, "past", 8],
    batchAxis: 0,
    lengthAxis: 2,
  },
  {
    past: "past_key_values.1.value",
    made: "present.1.value",
    present: "present.1.value",
    shape: ["batch", 2, "past", 8],
    batchAxis: 0,
    lengthAxis: 2,
  },
];

const OUTPUTS = ["logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"];

/**
 * A tensor in a trace.
 *
 * @typedef {object} TracedTensor
 * @property {string} dtype - Its element type.
 * @property {readonly number[]} shape - Its sizes.
 * @property {readonly number[]} [data] - All of its numbers, where there are at most 64.
 * @property {readonly number[]} [sample] - Of a larger one, 64 numbers from the first to the last.
 */

/**
 * A call; as a line of JSON it is what `kvdoctor step-test MODEL --trace FILE` reads.
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
 * @property {InferenceSession.SessionOptions} [session] - How the runtime opens a file: execution providers, threads.
 * @property {Record<string, readonly string[]>} [external] - In a browser: the files beside a model file that hold its weights.
 * @property {(call: TracedCall) => void} [trace] - Takes every call; tensors are read for it.
 * @property {(value: Tensor) => Promise<Tensor.DataType>} [read] - How a trace reads; `getData` without it, which takes a tensor off its device.
 */

/**
 * How to decode.
 *
 * @typedef {object} GenerateOptions
 * @property {number} [most] - The most new tokens; 20 without it.
 * @property {readonly number[]} [stop] - Tokens that end a sequence.
 * @property {(logits: Logits) => number} [choose] - Picks a token; without it the likeliest is taken.
 * @property {(row: number, token: number) => void} [onToken] - Called for each new token with the row and the token.
 */

/**
 * The model, and the cache of one batch of sequences.
 *
 * Await each call before the next one: a call while another is under way is refused.
 * The cache goes from call to call as the runtime returned it.
 * A value is disposed of as soon as the next call has replaced it.
 */
export class Decoder {
  /** @type {InferenceSession} */
  #decoder;
  /** @type {((call: TracedCall) => void) | undefined} */
  #trace;
  /** @type {(value: Tensor) => Promise<Tensor.DataType>} */
  #read;
  #busy = false;
  #length = 0;
  /** @type {readonly number[]} */
  #padding = [];
  /** @type {Map<string, Tensor>} */
  #cache = new Map();

  /**
   * @private Use {@link Decoder.open}.
   * @param {InferenceSession} decoder
   * @param {OpenOptions} options
   */
  constructor(decoder, options) {
    this.#decoder = decoder;
    this.#trace = options.trace;
    this.#read = options.read ?? ((value) => value.getData());
  }

  /**
   * Open the files in `folder`: a path, or in a browser a URL.
   *
   * @param {string} folder
   * @param {OpenOptions} [options]
   * @returns {Promise<Decoder>}
   */
  static async open(folder, options = {}) {
    /** @param {string} file */
    const opened = (file) => {
      const path = `${folder}/${file}`;
      const beside = path.slice(0, path.lastIndexOf("/"));
      const weights = options.external?.[file]?.map((name) => ({
        path: name,
        data: `${beside}/${name}`,
      }));
      const session = weights ? { ...options.session, externalData: weights } : options.session;
      return InferenceSession.create(path, session);
    };
    return new Decoder(await opened(DECODER), options);
  }

  /** Tokens in the cache, padding counted. */
  get length() {
    return this.#length;
  }

  /** Begin anew: no sequences. */
  reset() {
    this.#refuseWhileBusy();
    this.#forget();
  }

  /** Give back the memory of the model; the decoder cannot be used afterwards. */
  async close() {
    await this.#alone(async () => {
      this.#forget();
      await this.#decoder.release();
    });
  }

  #refuseWhileBusy() {
    if (this.#busy) {
      throw new Error("another call of this decoder is under way: await it first");
    }
  }

  /**
   * Run a call that no other call may interrupt: both would change the cache.
   *
   * @template T
   * @param {() => Promise<T>} call
   * @returns {Promise<T>}
   */
  async #alone(call) {
    this.#refuseWhileBusy();
    this.#busy = true;
    try {
      return await call();
    } finally {
      this.#busy = false;
    }
  }

  #forget() {
    this.#clear([]);
  }

  /**
   * Forget the sequences; `padding` is that of the next ones.
   *
   * @param {readonly number[]} padding
   */
  #clear(padding) {
    this.#length = 0;
    this.#padding = padding;
    for (const value of this.#cache.values()) {
      value.dispose();
    }
    this.#cache.clear();
  }

  /**
   * Replace a part of the cache.
   *
   * @param {string} past
   * @param {Tensor} value
   */
  #keep(past, value) {
    this.#cache.get(past)?.dispose();
    this.#cache.set(past, value);
  }

  /**
   * Begin sequences with their prompts; returns the last logits of each.
   *
   * Shorter prompts are padded on the left: the mask hides the padding, and positions do not count it.
   *
   * @param {Tokens} prompts
   * @returns {Promise<Logits[]>}
   */
  async prefill(prompts) {
    return this.#alone(() => this.#prefill(prompts));
  }

  /**
   * Begin sequences, for `prefill` and `generate`.
   *
   * @param {Tokens} prompts
   * @returns {Promise<Logits[]>}
   */
  async #prefill(prompts) {
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    if (prompts.length === 0 || prompts.some((prompt) => prompt.length === 0)) {
      throw new RangeError("every sequence begins with at least one token");
    }
    checkTokens(prompts);
    const padding = prompts.map((prompt) => longest - prompt.length);
    this.#clear(padding);
    const tokens = prompts.map((prompt, row) => [...Array(padding[row]).fill(0), ...prompt]);
    return this.#advance(tokens);
  }

  /**
   * Continue each sequence with its new tokens; returns logits as `prefill` does.
   *
   * @param {Tokens} tokens
   * @returns {Promise<Logits[]>}
   */
  async step(tokens) {
    return this.#alone(() => this.#step(tokens));
  }

  /**
   * Continue the sequences, for `step` and `generate`.
   *
   * @param {Tokens} tokens
   * @returns {Promise<Logits[]>}
   */
  async #step(tokens) {
    if (this.#length === 0) {
      throw new Error("begin with prefill()");
    }
    const [rows] = shapeOf(tokens, "the tokens of a step");
    if (rows !== this.#padding.length) {
      throw new RangeError(`a step takes tokens of each of ${this.#padding.length} sequences`);
    }
    checkTokens(tokens);
    return this.#advance(tokens);
  }

  /**
   * Run one call on new tokens, and keep what it returns of the cache.
   *
   * @param {Tokens} tokens
   * @returns {Promise<Logits[]>}
   */
  async #advance(tokens) {
    if (this.#length + tokens[0].length > MOST_TOKENS) {
      throw new RangeError(`a sequence has at most ${MOST_TOKENS} tokens here`);
    }
    const first = this.#length === 0;
    if (first) {
      for (const slot of CACHE) {
        this.#keep(slot.past, this.#firstValue(slot, tokens.length));
      }
    }
    const outputs = await this.#run(this.#decoder, DECODER, this.#feeds(tokens), OUTPUTS);
    for (const slot of CACHE) {
      const name = first ? slot.made : slot.present;
      if (name !== null && Object.hasOwn(outputs, name)) {
        this.#keep(slot.past, outputs[name]);
      }
    }
    this.#length += tokens[0].length;
    return lastRows(outputs["logits"], tokens.length);
  }

  /**
   * What a call is fed.
   *
   * @param {Tokens} tokens
   * @returns {Values}
   */
  #feeds(tokens) {
    const batch = tokens.length;
    const count = tokens[0].length;
    const past = this.#length;
    const total = past + count;
    return {
      input_ids: new Tensor("int64", tokens.flat(), [batch, count]),
      attention_mask: mask([batch, total], this.#padding),
      position_ids: positions([batch, count], past, this.#padding),
      ...Object.fromEntries(this.#cache),
    };
  }

  /**
   * What the first call is fed: zeros.
   *
   * @param {Slot} slot
   * @param {number} batch
   * @returns {Tensor}
   */
  #firstValue(slot, batch) {
    const sizes = { batch, past: 0 };
    const shape = slot.shape.map((size) => (typeof size === "number" ? size : sizes[size]));
    return new Tensor("float32", new Float32Array(product(shape)), shape);
  }

  /**
   * Forget the last `count` tokens of every sequence. At least one token must stay.
   *
   * @param {number} count
   */
  async rewind(count) {
    this.#refuseWhileBusy();
    const shortest = this.#length - Math.max(0, ...this.#padding);
    if (!Number.isInteger(count) || count < 0 || count >= shortest) {
      throw new RangeError(`cannot forget ${count} of ${shortest} tokens`);
    }
    await this.#alone(async () => {
      this.#length -= count;
      for (const slot of CACHE) {
        const value = this.#cache.get(slot.past);
        if (value !== undefined) {
          this.#keep(slot.past, await join(slot.lengthAxis, [[value, 0, this.#length]]));
        }
      }
    });
  }

  /**
   * Make row i of the batch a copy of what row `rows[i]` was, as a beam search needs it.
   *
   * @param {readonly number[]} rows
   */
  async reorder(rows) {
    this.#refuseWhileBusy();
    if (rows.length === 0 || rows.some((row) => !(row in this.#padding))) {
      throw new RangeError(`there are ${this.#padding.length} sequences, not all of: ${rows}`);
    }
    await this.#alone(async () => {
      for (const slot of CACHE) {
        const value = this.#cache.get(slot.past);
        if (value !== undefined) {
          this.#keep(slot.past, await take(value, slot.batchAxis, rows));
        }
      }
      this.#padding = rows.map((row) => this.#padding[row]);
    });
  }

  /**
   * Decode until every sequence has ended.
   *
   * Returns the new tokens of each, the stop token not among them.
   *
   * @param {Tokens} prompts
   * @param {GenerateOptions} [options]
   * @returns {Promise<number[][]>}
   */
  async generate(prompts, options = {}) {
    return this.#alone(() => this.#generate(prompts, options));
  }

  /**
   * Decode, for `generate`.
   *
   * @param {Tokens} prompts
   * @param {GenerateOptions} options
   * @returns {Promise<number[][]>}
   */
  async #generate(prompts, options) {
    const { most = 20, stop = [], choose = likeliest, onToken } = options;
    if (!(most >= 1)) {
      throw new RangeError(`most is 1 or more; got ${most}`);
    }
    /** @type {number[][]} */
    const made = prompts.map(() => []);
    const running = prompts.map(() => true);
    let logits = await this.#prefill(prompts);
    for (;;) {
      const chosen = logits.map((row) => choose(row));
      for (const [row, token] of chosen.entries()) {
        running[row] &&= !stop.includes(token);
        if (running[row]) {
          made[row].push(token);
          onToken?.(row, token);
        }
      }
      const longest = Math.max(...made.map((row) => row.length));
      if (!running.includes(true) || longest >= most || this.#length >= MOST_TOKENS) {
        return made;
      }
      logits = await this.#step(chosen.map((token) => [token]));
    }
  }

  /**
   * Run one call, and note it where a trace is wanted.
   *
   * @param {InferenceSession} session
   * @param {string} file
   * @param {Values} feeds
   * @param {readonly string[]} names
   * @returns {Promise<Values>}
   */
  async #run(session, file, feeds, names) {
    /** @type {Values} */
    let outputs = {};
    /** @type {string | null} */
    let error = null;
    try {
      outputs = await session.run(feeds, names);
      return outputs;
    } catch (raised) {
      error = String(raised);
      throw raised;
    } finally {
      if (this.#trace !== undefined) {
        const [fed, got] = [await this.#traced(feeds), await this.#traced(outputs)];
        this.#trace({ file, fed, got, error });
      }
    }
  }

  /**
   * Tensors as a trace has them.
   *
   * @param {Values} values
   * @returns {Promise<Record<string, TracedTensor>>}
   */
  async #traced(values) {
    /** @type {[string, TracedTensor][]} */
    const entries = [];
    for (const [name, value] of Object.entries(values)) {
      const data = /** @type {ArrayLike<unknown>} */ (await this.#read(value));
      const read = places(data.length).map((place) => Number(data[place]));
      const part = data.length > 64 ? { sample: read } : { data: read };
      entries.push([name, { dtype: value.type, shape: value.dims, ...part }]);
    }
    return Object.fromEntries(entries);
  }
}

/**
 * The number of elements of a shape.
 *
 * @param {readonly number[]} shape
 * @returns {number}
 */
export function product(shape) {
  return shape.reduce((elements, size) => elements * size, 1);
}

/**
 * The shape of rows of numbers: at least one in each, and the same number.
 *
 * @param {Tokens} rows
 * @param {string} name
 * @returns {[number, number]}
 */
function shapeOf(rows, name) {
  const columns = rows[0]?.length ?? 0;
  if (columns === 0 || rows.some((row) => row.length !== columns)) {
    throw new RangeError(`${name}: give rows of the same length, at least 1`);
  }
  return [rows.length, columns];
}

/**
 * Refuse what is no token id of this model.
 *
 * @param {Tokens} rows
 */
function checkTokens(rows) {
  if (!rows.flat().every((id) => Number.isInteger(id) && id >= 0 && id < VOCABULARY)) {
    throw new RangeError(`token ids are 0 to ${VOCABULARY - 1}`);
  }
}

/**
 * The index of the largest value.
 *
 * @param {Logits} logits
 * @returns {number}
 */
export function likeliest(logits) {
  let best = 0;
  // Not with `reduce`: a call for each entry of the vocabulary takes several times as long.
  for (let token = 1; token < logits.length; token++) {
    if (logits[token] > logits[best]) {
      best = token;
    }
  }
  return best;
}

/**
 * The last row of each sequence, of logits of any rank; the tensor is disposed of.
 *
 * @param {Tensor} logits
 * @param {number} batch
 * @returns {Promise<Logits[]>}
 */
async function lastRows(logits, batch) {
  const data = /** @type {Float32Array} */ (await logits.getData());
  const rowsOfEach = logits.dims.length === 3 ? logits.dims[1] : 1;
  const width = data.length / batch / rowsOfEach;
  const rows = Array.from({ length: batch }, (_, row) => {
    const end = (row + 1) * rowsOfEach * width;
    return data.slice(end - width, end);
  });
  logits.dispose();
  return rows;
}

/**
 * A tensor of values that are computed from their place in it.
 *
 * @param {readonly number[]} shape
 * @param {(column: number, row: number) => number} value
 * @returns {Tensor}
 */
function filled(shape, value) {
  const columns = shape[shape.length - 1] ?? 1;
  const values = Array.from({ length: product(shape) }, (_, index) =>
    value(index % columns, Math.floor(index / columns)),
  );
  return new Tensor("int64", values, shape);
}

/**
 * 1 for tokens, 0 for padding on the left. Columns are the cache.
 *
 * @param {readonly number[]} shape
 * @param {readonly number[]} padding
 * @returns {Tensor}
 */
function mask(shape, padding) {
  return filled(shape, (column, row) => Number(column >= padding[row]));
}

/**
 * The positions of the new tokens; padding on the left is not counted.
 *
 * @param {readonly number[]} shape
 * @param {number} past
 * @param {readonly number[]} padding
 * @returns {Tensor}
 */
function positions(shape, past, padding) {
  return filled(shape, (column, row) => Math.max(past + column - padding[row % padding.length], 0));
}

/**
 * A new tensor with the chosen rows of an axis.
 *
 * @param {Tensor} value
 * @param {number} axis
 * @param {readonly number[]} rows
 * @returns {Promise<Tensor>}
 */
async function take(value, axis, rows) {
  return join(
    axis,
    rows.map((row) => [value, row, row + 1]),
  );
}

/**
 * A new tensor of pieces, one after the other along an axis: bytes are copied, whatever their type.
 *
 * @param {number} axis
 * @param {readonly Piece[]} pieces
 * @returns {Promise<Tensor>}
 */
async function join(axis, pieces) {
  const [{ type, dims }] = pieces[0];
  const parts = [];
  for (const [value, from, to] of pieces) {
    // Not all at once: a tensor may be in several pieces, and is taken off a device only once.
    const data = /** @type {Uint8Array} */ (await value.getData()); // or another typed array
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    parts.push({ bytes, from, to, size: value.dims[axis], of: data.constructor });
  }
  const size = parts.reduce((sum, { from, to }) => sum + Math.max(to - from, 0), 0);
  const blocks = product(dims.slice(0, axis));
  const shape = dims.map((dim, at) => (at === axis ? size : dim));
  const Elements = /** @type {Uint8ArrayConstructor} */ (parts[0].of);
  const joined = new Elements(product(shape));
  const bytes = new Uint8Array(joined.buffer);
  const width = Elements.BYTES_PER_ELEMENT * product(dims.slice(axis + 1));
  let end = 0;
  for (let block = 0; block < blocks; block++) {
    for (const part of parts) {
      const start = block * part.size;
      const piece = part.bytes.subarray((start + part.from) * width, (start + part.to) * width);
      bytes.set(piece, end);
      end += piece.length;
    }
  }
  return new Tensor(type, joined, shape);
}

/**
 * Where a trace reads a tensor of so many elements: all of it, or 64 places from the first to the last.
 *
 * @param {number} size
 * @returns {number[]}
 */
function places(size) {
  return Array.from({ length: Math.min(size, 64) }, (_, place) =>
    size > 64 ? Math.floor((place * (size - 1)) / 63) : place,
  );
}
