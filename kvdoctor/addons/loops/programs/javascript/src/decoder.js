// A decode loop over ONNX Runtime. What is fed, fed back and held comes from contract.json, which kvdoctor writes.

import { Cache } from "./cache.js";
import { check } from "./check.js";
import { Model } from "./model.js";
import { sampler } from "./sampling.js";
import { ARRAYS, element, numbers, product, tensor } from "./tensors.js";

export { likeliest, sampler } from "./sampling.js";

/** @import { Runtime, Tensor } from "./tensors.js" */
/** @import { CallOptions, Contract, Logits, Source, Tokens } from "./types.js" */
/** @typedef {import("./types.js").DecodeOptions} DecodeOptions How to decode. */
/** @typedef {import("./types.js").OpenOptions} OpenOptions How to open a model. */

/**
 * A batch of sequences of a model.
 *
 * Await each call before the next one: a call while another is under way is refused. A call that fails leaves the
 * sequences as they were, but for `encode` and `prefill`, after which there are none.
 */
export class Decoder {
  /** @type {Model} */ #model;
  /** @type {Cache} */ #cache;
  #busy = false;
  #calls = 0;
  #length = 0;
  /** @type {readonly number[]} */ #padding = [];
  /** @type {number[][]} without padding */ #tokens = [];
  /** @type {Tokens | undefined} of the source */ #sourceMask;
  /** @type {Tokens | undefined} of the source, in the order of the rows */ #mask;

  /** @param {Model} model */
  constructor(model) {
    this.#model = model;
    this.#cache = new Cache(model.ort, new Cache(model.ort));
  }

  /**
   * Open a model, and compare it with its contract.
   *
   * @param {Runtime} ort - the module onnxruntime-node or onnxruntime-web
   * @param {string} model - the folder of its files; in a browser its address
   * @param {unknown} contract - the object in contract.json
   * @param {OpenOptions} [options]
   */
  static async open(ort, model, contract, options = {}) {
    return new Decoder(await Model.open(ort, model, contract, options));
  }

  /** Another decoder of the same model: it shares the sessions, and has sequences of its own. */
  another() {
    return new Decoder(this.#model);
  }

  /** The tokens in the cache of each sequence, without padding. */
  get tokens() {
    return this.#tokens.map((row) => [...row]);
  }

  /** Forget the sequences and the source. */
  reset() {
    this.#refuseWhileBusy();
    this.#calls++;
    this.#forget();
  }

  /** Give back the cache and the sessions, those of all decoders that share them. */
  async close() {
    this.reset();
    await this.#model.close();
  }

  /**
   * Say what the sequences are about: the encoder of the model reads it.
   *
   * Rows of ids may have unequal lengths where the model takes a mask of them: they are padded on the right.
   *
   * @param {Tokens | Source} source
   * @param {Tokens} [mask] - 0 for padding; without it all of the source is read
   */
  async encode(source, mask) {
    const { contract, ort } = this.#model;
    const { source: expected } = contract;
    check(expected !== null, "the model reads no source");
    const { data, shape, padding } =
      "shape" in source ? { ...source, padding: undefined } : padSources(source, expected);
    const fits = expected.dims.every((dim, axis) => typeof dim === "string" || dim === shape[axis]);
    check(
      shape.length === expected.dims.length && fits && product(shape) === data.length && data.length > 0,
      `the source is ${expected.dtype}[${expected.dims}]; got ${data.length} numbers as [${shape}]`,
    );
    const batch = shape[expected.batch_axis ?? 0];
    const masked = [batch, shape[expected.length_axis]];
    const given = mask && sameLength(mask, "the mask");
    check(
      !given || (expected.masked && String(given) === String(masked)),
      `the mask has shape [${expected.masked ? masked : ""}]; got [${given}]`,
    );
    await this.#alone(async () => {
      this.#forget();
      const array = new ARRAYS[expected.dtype](data.length);
      data.forEach((value, at) => (array[at] = element(expected.dtype, value)));
      this.#encoded.set([["source", tensor(ort, expected.dtype, shape, array)]]);
      this.#sourceMask = this.#mask = mask ?? padding;
      try {
        await this.#run("encode", this.#encoded, Array(batch).fill([]));
      } catch (error) {
        this.#forget();
        throw error;
      }
    });
  }

  /**
   * Begin sequences with their prompts; returns the logits of the last token of each.
   *
   * Shorter prompts are padded on the left, where the contract says that the model hides it.
   *
   * @param {Tokens} prompts
   * @param {CallOptions} [options]
   * @returns {Promise<Logits[]>}
   */
  async prefill(prompts, options = {}) {
    const { batch, pads, source } = this.#model.contract;
    const shape = this.#encoded.get("source")?.dims;
    check(source === null || shape !== undefined, "begin with encode()");
    check(
      prompts.length > 0 && prompts.every((prompt) => prompt.length > 0),
      "every sequence begins with at least one token",
    );
    const sources = source?.batch_axis == null ? undefined : shape?.[source.batch_axis];
    check(
      prompts.length === (batch ?? sources ?? prompts.length),
      `${prompts.length} prompts for ${batch === null ? `${sources} sources` : `a batch of ${batch}`}`,
    );
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    const padding = prompts.map((prompt) => longest - prompt.length);
    check(pads || Math.max(...padding) === 0, "the prompts of a batch must have the same length");
    this.#checkTokens(prompts, longest, padding);
    options.signal?.throwIfAborted();
    const rows = prompts.map((prompt, row) => [...Array(padding[row]).fill(0), ...prompt]);
    return this.#alone(async () => {
      this.#clear();
      this.#padding = padding;
      this.#tokens = prompts.map(() => []);
      this.#cache.begin(this.#model.contract.zeros, this.#sizes(rows));
      try {
        return await this.#advance(rows, options);
      } catch (error) {
        this.#clear();
        throw error;
      }
    });
  }

  /**
   * Continue each sequence with its new tokens; returns logits as `prefill` does.
   *
   * @param {Tokens} tokens - the same number for each sequence
   * @param {CallOptions} [options]
   * @returns {Promise<Logits[]>}
   */
  async step(tokens, options = {}) {
    check(this.#length > 0, "begin with prefill()");
    const [rows, count] = sameLength(tokens, "the tokens of a step");
    const { chunks } = this.#model.contract;
    const wanted = chunks ? "tokens" : "one token";
    check(
      rows === this.#padding.length && (count === 1 || chunks),
      `a step takes ${wanted} of each of ${this.#padding.length} sequences`,
    );
    this.#checkTokens(tokens, this.#length + count);
    return this.#alone(() => this.#advance(tokens, options));
  }

  /** Forget the last `count` tokens of every sequence. At least one token must stay. @param {number} count */
  async rewind(count) {
    const shortest = this.#length - Math.max(0, ...this.#padding);
    const { context_limit, cut, rewinds } = this.#model.contract;
    // What a ring has written over is gone.
    check(rewinds && this.#length <= context_limit, "a part of the cache of this model cannot go back");
    check(Number.isInteger(count) && count >= 0 && count < shortest, `cannot forget ${count} of ${shortest} tokens`);
    await this.#alone(async () => {
      await this.#cache.cut(cut, this.#length - count);
      this.#length -= count;
      this.#tokens = this.#tokens.map((row) => row.slice(0, row.length - count));
    });
  }

  /**
   * Make row i of the batch a copy of what row `rows[i]` was, as a beam search needs it.
   *
   * @param {readonly number[]} rows
   */
  async reorder(rows) {
    check(this.#model.contract.reorders, "the sequences of this model cannot change places");
    check(
      rows.length > 0 && rows.every((row) => row in this.#padding),
      `there are ${this.#padding.length} sequences, not all of: ${rows}`,
    );
    await this.#alone(async () => {
      await this.#cache.reorder(this.#model.contract.rows, rows);
      const mask = this.#mask;
      this.#mask = mask && rows.map((row) => mask[row]);
      this.#padding = rows.map((row) => this.#padding[row]);
      this.#tokens = rows.map((row) => [...this.#tokens[row]]);
    });
  }

  /**
   * Decode until every sequence has ended; returns the new tokens of each, without the one that ended it.
   *
   * @param {Tokens} tokens - the prompts; with `continued` what the sequences go on with
   * @param {DecodeOptions} [options]
   */
  async generate(tokens, options) {
    /** @type {number[][]} */
    const made = tokens.map(() => []);
    for await (const { sequence, token } of this.stream(tokens, options)) {
      made[sequence].push(token);
    }
    return made;
  }

  /**
   * Decode until every sequence has ended, and give each new token as soon as it is chosen.
   *
   * The tokens that were chosen last are not in the cache: with `continued`, give them first.
   *
   * @param {Tokens} tokens - the prompts; with `continued` what the sequences go on with
   * @param {DecodeOptions} [options]
   * @returns {AsyncGenerator<{ sequence: number, token: number }, void>}
   */
  async *stream(tokens, options = {}) {
    const { end, forced, suppress, begin_suppress } = this.#model.contract.generation;
    const { most = 20, stop = end, continued = false, choose = sampler(options), signal } = options;
    check(most >= 1, `most is 1 or more; got ${most}`);
    const running = tokens.map(() => true);
    let logits = await (continued ? this.step(tokens, { signal }) : this.prefill(tokens, { signal }));
    for (let count = 1; ; count++) {
      const calls = this.#calls;
      const chosen = logits.map((row, sequence) => {
        const [, id] = forced.find(([position]) => position === this.#tokens[sequence].length) ?? [];
        if (id !== undefined || !running[sequence]) {
          return id ?? 0; // what is fed to a sequence that has ended does not matter
        }
        const suppressed = count > 1 || continued ? suppress : [...suppress, ...begin_suppress];
        suppressed.forEach((id) => (row[id] = -Infinity));
        return choose(row, this.#tokens[sequence]);
      });
      this.#checkTokens([chosen]);
      for (const [sequence, token] of chosen.entries()) {
        running[sequence] &&= !stop.includes(token);
        if (running[sequence]) {
          yield { sequence, token };
        }
      }
      if (!running.includes(true) || count >= most || this.#length >= this.#model.most) {
        return;
      }
      check(this.#calls === calls, "another call of this decoder was made while it gave tokens");
      const added = chosen.map((token) => [token]);
      logits = await this.step(added, { signal });
    }
  }

  /** Run the calls on new tokens; the logits of the last one. @param {Tokens} tokens @param {CallOptions} options */
  async #advance(tokens, { every, signal }) {
    const { context_limit, one_token } = this.#model.contract;
    const count = tokens[0].length;
    // In a ring that is full, one is written over the oldest.
    const size = one_token || this.#length + count > context_limit ? 1 : count;
    /** @type {Logits[]} */
    let logits = [];
    for (let at = 0; at < count; at += size) {
      signal?.throwIfAborted();
      const [length, added] = [this.#length, tokens.map((row) => row.slice(at, at + size))];
      logits = await this.#run(length === 0 ? "prefill" : "decode", this.#cache, added, every);
      added.forEach((row, at) => this.#tokens[at].push(...row.slice(Math.max(this.#padding[at] - length, 0))));
      this.#length += size;
    }
    return logits;
  }

  /**
   * Run the calls of a phase, and take over what they return; the logits of the last one.
   *
   * @param {keyof Contract["calls"]} phase
   * @param {Cache} cache
   * @param {Tokens} tokens
   * @param {boolean} [every]
   */
  async #run(phase, cache, tokens, every = false) {
    const moment = { sizes: this.#sizes(tokens), rows: { tokens, mask: this.#mask }, padding: this.#padding };
    /** @type {Logits[]} */
    let rows = [];
    for (const call of this.#model.contract.calls[phase]) {
      const outputs = await this.#model.run(call, moment, cache);
      const logits = outputs[call.logits ?? ""];
      rows = logits === undefined ? [] : await this.#readLogits(logits, tokens, every);
      await cache.take(call.takes, outputs, this.#length);
      logits?.dispose();
    }
    return rows;
  }

  /** What axes and terms count in a call. @param {Tokens} tokens @returns {Record<string, number>} */
  #sizes(tokens) {
    const { capacity, contract } = this.#model;
    const [batch, added, past] = [tokens.length, tokens[0].length, this.#length];
    return { one: 1, batch, batch_heads: batch * contract.heads, new: added, past, total: past + added, capacity };
  }

  /**
   * The logits of each sequence: of its last token, or of all new ones.
   *
   * @param {Tensor} logits
   * @param {Tokens} tokens
   * @param {boolean} every
   */
  async #readLogits(logits, tokens, every) {
    const data = await logits.getData();
    const count = logits.dims.length === 3 && logits.dims[0] === tokens.length ? logits.dims[1] : 1;
    check(!every || count === tokens[0].length, "the graph returns the logits of the last token alone");
    const width = data.length / tokens.length / count;
    return tokens.map((_, row) => {
      const skipped = every ? Math.min(Math.max(this.#padding[row] - this.#length, 0), count) : count - 1;
      const found = numbers(logits.type, data, (row * count + skipped) * width, (row + 1) * count * width);
      // Not a view of the logits of a long prompt, which would stay for as long as the row is used.
      return count > 1 ? found.slice() : found;
    });
  }

  get #encoded() {
    return /** @type {Cache} */ (this.#cache.encoded);
  }

  #forget() {
    this.#sourceMask = undefined;
    this.#clear();
    this.#encoded.clear();
  }

  #clear() {
    this.#length = 0;
    this.#padding = [];
    this.#tokens = [];
    this.#mask = this.#sourceMask;
    this.#cache.clear();
  }

  #refuseWhileBusy() {
    check(!this.#busy, "another call of this decoder is under way: await each before the next");
  }

  /**
   * Run a call that no other call may interrupt: both would change the cache.
   *
   * @template T
   * @param {() => Promise<T>} call
   */
  async #alone(call) {
    this.#refuseWhileBusy();
    this.#busy = true;
    this.#calls++;
    try {
      return await call();
    } finally {
      this.#busy = false;
    }
  }

  /**
   * Refuse ids that are no tokens of text, and sequences that would be too long.
   *
   * @param {Tokens} rows
   * @param {number} [length] - of the sequences with them
   * @param {readonly number[]} [padding]
   */
  #checkTokens(rows, length = 0, padding = this.#padding) {
    const { context_limit, placeholders, vocabulary } = this.#model.contract;
    // A ring has no place for padding.
    const most = Math.min(this.#model.most, Math.max(0, ...padding) > 0 ? context_limit : Infinity);
    check(
      rows.flat().every((id) => Number.isInteger(id) && id >= 0 && id < vocabulary),
      `token ids are whole numbers, 0 to ${vocabulary - 1}`,
    );
    const stand = placeholders.find((id) => rows.some((row) => row.includes(id)));
    check(stand === undefined, `token ${stand} stands for an image or audio, which this program does not take`);
    check(length <= most, `a sequence has at most ${most} tokens here`);
  }
}

/**
 * Rows of ids as one array, with their mask: padded on the right where the model takes a mask.
 *
 * @param {Tokens} rows
 * @param {NonNullable<Contract["source"]>} source
 */
function padSources(rows, { dtype, masked }) {
  check(dtype.startsWith("int"), "the source is numbers with their shape");
  const longest = Math.max(0, ...rows.map((row) => row.length));
  check(
    rows.length > 0 && rows.every((row) => row.length > 0 && (row.length === longest || masked)),
    "the source: give rows of the same length, at least 1",
  );
  check(
    rows.flat().every((id) => Number.isSafeInteger(id) && id >= 0),
    "the ids of the source are whole numbers, 0 or more",
  );
  const columns = [...Array(longest).keys()];
  const data = rows.flatMap((row) => columns.map((column) => row[column] ?? 0));
  const padding = rows.map((row) => columns.map((column) => Number(column < row.length)));
  return { data, shape: [rows.length, longest], padding };
}

/**
 * The shape of rows of numbers: at least one in each, and the same number.
 *
 * @param {Tokens} rows
 * @param {string} name
 * @returns {[number, number]}
 */
function sameLength(rows, name) {
  const columns = rows[0]?.length ?? 0;
  check(
    columns > 0 && rows.every((row) => row.length === columns),
    `${name}: give rows of the same length, at least 1`,
  );
  return [rows.length, columns];
}
