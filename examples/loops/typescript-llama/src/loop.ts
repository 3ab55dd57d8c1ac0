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

/** Token ids, a list for each sequence of the batch. */
export type Tokens = readonly (readonly number[])[];
/** What each entry of the vocabulary scores, of one sequence. */
export type Logits = Float32Array;
type Values = InferenceSession.OnnxValueMapType;
/** Part of a tensor along an axis. */
type Piece = readonly [value: Tensor, from: number, to: number];
/** An axis whose size is known only when the loop runs. */
type Axis = "batch" | "past";

const DECODER = "model.onnx";
/** The most tokens that a sequence may have. */
const MOST_TOKENS = 64;
/** Entries of the vocabulary: token ids are below it. */
const VOCABULARY = 128;

/** One tensor of the cache. */
export interface Slot {
  /** The input that it is fed to. */
  readonly past: string;
  /** The output that first fills it, of the first call. */
  readonly made: string | null;
  /** The output of each later call that carries it on; null where the first value is kept. */
  readonly present: string | null;
  /** Its sizes. */
  readonly shape: readonly (number | Axis)[];
  /** The axis of the sequences. */
  readonly batchAxis: number;
  /** The axis of the tokens. */
  readonly lengthAxis: number;
}

const CACHE: readonly Slot[] = [
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

/** A tensor in a trace. */
export interface TracedTensor {
  /** Its element type. */
  readonly dtype: string;
  /** Its sizes. */
  readonly shape: readonly number[];
  /** All of its numbers, where there are at most 64. */
  readonly data?: readonly number[];
  /** Of a larger one, 64 numbers from the first to the last. */
  readonly sample?: readonly number[];
}

/** A call; as a line of JSON it is what `kvdoctor step-test MODEL --trace FILE` reads. */
export interface TracedCall {
  /** The file that was called. */
  readonly file: string;
  /** What it was fed. */
  readonly fed: Record<string, TracedTensor>;
  /** What it returned. */
  readonly got: Record<string, TracedTensor>;
  /** The error, where it failed. */
  readonly error: string | null;
}

/** How to open a model. */
export interface OpenOptions {
  /** How the runtime opens a file: execution providers, threads. */
  readonly session?: InferenceSession.SessionOptions;
  /** In a browser: the files beside a model file that hold its weights. */
  readonly external?: Record<string, readonly string[]>;
  /** Takes every call; tensors are read for it. */
  readonly trace?: (call: TracedCall) => void;
  /** How a trace reads; `getData` without it, which takes a tensor off its device. */
  readonly read?: (value: Tensor) => Promise<Tensor.DataType>;
}

/** How to decode. */
export interface GenerateOptions {
  /** The most new tokens; 20 without it. */
  readonly most?: number;
  /** Tokens that end a sequence. */
  readonly stop?: readonly number[];
  /** Picks a token; without it the likeliest is taken. */
  readonly choose?: (logits: Logits) => number;
  /** Called for each new token with the row and the token. */
  readonly onToken?: (row: number, token: number) => void;
}

/**
 * The model, and the cache of one batch of sequences.
 *
 * Await each call before the next one: a call while another is under way is refused.
 * The cache goes from call to call as the runtime returned it.
 * A value is disposed of as soon as the next call has replaced it.
 */
export class Decoder {
  readonly #decoder: InferenceSession;
  readonly #trace: ((call: TracedCall) => void) | undefined;
  readonly #read: (value: Tensor) => Promise<Tensor.DataType>;
  #busy = false;
  #length = 0;
  #padding: readonly number[] = [];
  #cache: Map<string, Tensor> = new Map();

  private constructor(decoder: InferenceSession, options: OpenOptions) {
    this.#decoder = decoder;
    this.#trace = options.trace;
    this.#read = options.read ?? ((value) => value.getData());
  }

  /** Open the files in `folder`: a path, or in a browser a URL. */
  static async open(folder: string, options: OpenOptions = {}): Promise<Decoder> {
    const opened = (file: string) => {
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
  get length(): number {
    return this.#length;
  }

  /** Begin anew: no sequences. */
  reset(): void {
    this.#refuseWhileBusy();
    this.#forget();
  }

  /** Give back the memory of the model; the decoder cannot be used afterwards. */
  async close(): Promise<void> {
    await this.#alone(async () => {
      this.#forget();
      await this.#decoder.release();
    });
  }

  #refuseWhileBusy(): void {
    if (this.#busy) {
      throw new Error("another call of this decoder is under way: await it first");
    }
  }

  /** Run a call that no other call may interrupt: both would change the cache. */
  async #alone<T>(call: () => Promise<T>): Promise<T> {
    this.#refuseWhileBusy();
    this.#busy = true;
    try {
      return await call();
    } finally {
      this.#busy = false;
    }
  }

  #forget(): void {
    this.#clear([]);
  }

  /** Forget the sequences; `padding` is that of the next ones. */
  #clear(padding: readonly number[]): void {
    this.#length = 0;
    this.#padding = padding;
    for (const value of this.#cache.values()) {
      value.dispose();
    }
    this.#cache.clear();
  }

  /** Replace a part of the cache. */
  #keep(past: string, value: Tensor): void {
    this.#cache.get(past)?.dispose();
    this.#cache.set(past, value);
  }

  /**
   * Begin sequences with their prompts; returns the last logits of each.
   *
   * Shorter prompts are padded on the left: the mask hides the padding, and positions do not count it.
   */
  async prefill(prompts: Tokens): Promise<Logits[]> {
    return this.#alone(() => this.#prefill(prompts));
  }

  /** Begin sequences, for `prefill` and `generate`. */
  async #prefill(prompts: Tokens): Promise<Logits[]> {
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

  /** Continue each sequence with its new tokens; returns logits as `prefill` does. */
  async step(tokens: Tokens): Promise<Logits[]> {
    return this.#alone(() => this.#step(tokens));
  }

  /** Continue the sequences, for `step` and `generate`. */
  async #step(tokens: Tokens): Promise<Logits[]> {
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

  /** Run one call on new tokens, and keep what it returns of the cache. */
  async #advance(tokens: Tokens): Promise<Logits[]> {
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

  /** What a call is fed. */
  #feeds(tokens: Tokens): Values {
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

  /** What the first call is fed: zeros. */
  #firstValue(slot: Slot, batch: number): Tensor {
    const sizes = { batch, past: 0 };
    const shape = slot.shape.map((size) => (typeof size === "number" ? size : sizes[size]));
    return new Tensor("float32", new Float32Array(product(shape)), shape);
  }

  /** Forget the last `count` tokens of every sequence. At least one token must stay. */
  async rewind(count: number): Promise<void> {
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

  /** Make row i of the batch a copy of what row `rows[i]` was, as a beam search needs it. */
  async reorder(rows: readonly number[]): Promise<void> {
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
   */
  async generate(prompts: Tokens, options: GenerateOptions = {}): Promise<number[][]> {
    return this.#alone(() => this.#generate(prompts, options));
  }

  /** Decode, for `generate`. */
  async #generate(prompts: Tokens, options: GenerateOptions): Promise<number[][]> {
    const { most = 20, stop = [], choose = likeliest, onToken } = options;
    if (!(most >= 1)) {
      throw new RangeError(`most is 1 or more; got ${most}`);
    }
    const made: number[][] = prompts.map(() => []);
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

  /** Run one call, and note it where a trace is wanted. */
  async #run(
    session: InferenceSession,
    file: string,
    feeds: Values,
    names: readonly string[],
  ): Promise<Values> {
    let outputs: Values = {};
    let error: string | null = null;
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

  /** Tensors as a trace has them. */
  async #traced(values: Values): Promise<Record<string, TracedTensor>> {
    const entries: [string, TracedTensor][] = [];
    for (const [name, value] of Object.entries(values)) {
      const data = (await this.#read(value)) as ArrayLike<unknown>;
      const read = places(data.length).map((place) => Number(data[place]));
      const part = data.length > 64 ? { sample: read } : { data: read };
      entries.push([name, { dtype: value.type, shape: value.dims, ...part }]);
    }
    return Object.fromEntries(entries);
  }
}

/** The number of elements of a shape. */
export function product(shape: readonly number[]): number {
  return shape.reduce((elements, size) => elements * size, 1);
}

/** The shape of rows of numbers: at least one in each, and the same number. */
function shapeOf(rows: Tokens, name: string): [number, number] {
  const columns = rows[0]?.length ?? 0;
  if (columns === 0 || rows.some((row) => row.length !== columns)) {
    throw new RangeError(`${name}: give rows of the same length, at least 1`);
  }
  return [rows.length, columns];
}

/** Refuse what is no token id of this model. */
function checkTokens(rows: Tokens): void {
  if (!rows.flat().every((id) => Number.isInteger(id) && id >= 0 && id < VOCABULARY)) {
    throw new RangeError(`token ids are 0 to ${VOCABULARY - 1}`);
  }
}

/** The index of the largest value. */
export function likeliest(logits: Logits): number {
  let best = 0;
  // Not with `reduce`: a call for each entry of the vocabulary takes several times as long.
  for (let token = 1; token < logits.length; token++) {
    if (logits[token] > logits[best]) {
      best = token;
    }
  }
  return best;
}

/** The last row of each sequence, of logits of any rank; the tensor is disposed of. */
async function lastRows(logits: Tensor, batch: number): Promise<Logits[]> {
  const data = (await logits.getData()) as Float32Array;
  const rowsOfEach = logits.dims.length === 3 ? logits.dims[1] : 1;
  const width = data.length / batch / rowsOfEach;
  const rows = Array.from({ length: batch }, (_, row) => {
    const end = (row + 1) * rowsOfEach * width;
    return data.slice(end - width, end);
  });
  logits.dispose();
  return rows;
}

/** A tensor of values that are computed from their place in it. */
function filled(shape: readonly number[], value: (column: number, row: number) => number): Tensor {
  const columns = shape[shape.length - 1] ?? 1;
  const values = Array.from({ length: product(shape) }, (_, index) =>
    value(index % columns, Math.floor(index / columns)),
  );
  return new Tensor("int64", values, shape);
}

/** 1 for tokens, 0 for padding on the left. Columns are the cache. */
function mask(shape: readonly number[], padding: readonly number[]): Tensor {
  return filled(shape, (column, row) => Number(column >= padding[row]));
}

/** The positions of the new tokens; padding on the left is not counted. */
function positions(shape: readonly number[], past: number, padding: readonly number[]): Tensor {
  return filled(shape, (column, row) => Math.max(past + column - padding[row % padding.length], 0));
}

/** A new tensor with the chosen rows of an axis. */
async function take(value: Tensor, axis: number, rows: readonly number[]): Promise<Tensor> {
  return join(
    axis,
    rows.map((row) => [value, row, row + 1]),
  );
}

/**
 * A new tensor of pieces, one after the other along an axis: bytes are copied, whatever their type.
 */
async function join(axis: number, pieces: readonly Piece[]): Promise<Tensor> {
  const [{ type, dims }] = pieces[0];
  const parts = [];
  for (const [value, from, to] of pieces) {
    // Not all at once: a tensor may be in several pieces, and is taken off a device only once.
    const data = (await value.getData()) as Uint8Array; // or another typed array
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    parts.push({ bytes, from, to, size: value.dims[axis], of: data.constructor });
  }
  const size = parts.reduce((sum, { from, to }) => sum + Math.max(to - from, 0), 0);
  const blocks = product(dims.slice(0, axis));
  const shape = dims.map((dim, at) => (at === axis ? size : dim));
  const Elements = parts[0].of as Uint8ArrayConstructor;
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
 */
function places(size: number): number[] {
  return Array.from({ length: Math.min(size, 64) }, (_, place) =>
    size > 64 ? Math.floor((place * (size - 1)) / 63) : place,
  );
}
