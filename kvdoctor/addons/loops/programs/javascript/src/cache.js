// The cache of one batch of sequences: what a call returns becomes what the next one is fed.

import { shapeOf } from "./inputs.js";
import { SOURCE } from "./model.js";
import { ARRAYS, join, product, tensor, typeName, write } from "./tensors.js";

/** @import { Model } from "./model.js" */
/** @import { Tensor } from "./tensors.js" */
/** @import { Call, Values } from "./types.js" */

/** A value is disposed of as soon as another one has replaced it. */
export class Cache {
  /** @type {Model} */ #model;
  /** @type {Map<string, Tensor>} what the next call is fed */ #values = new Map();
  /** @type {Map<string, Tensor>} what `encode` made, for each prefill */ #encoded = new Map();

  /** @param {Model} model */
  constructor(model) {
    this.#model = model;
  }

  /** @returns {ReadonlyMap<string, Tensor>} */
  get values() {
    return this.#values;
  }

  /** The shape of the source; undefined before `encode`. */
  get source() {
    return this.#encoded.get(SOURCE)?.dims;
  }

  /** Hold a source or what `encode` made of it, for every prefill after it. @param {Values} values */
  hold(values) {
    const { calls, slots } = this.#model.contract;
    const pasts = new Map(calls.encode?.fills.map(({ output, slot }) => [output, slots[slot].past]));
    Object.entries(values).forEach(([name, value]) => this.#encoded.set(pasts.get(name) ?? name, value));
    this.clear();
  }

  /** Forget the sequences. */
  clear() {
    const before = [...this.#values.values()];
    this.#values = new Map(this.#encoded);
    before.forEach((value) => this.#release(value));
  }

  /** Forget the sequences and the source. */
  forget() {
    const encoded = [...this.#encoded.values()];
    this.#encoded.clear();
    this.clear();
    encoded.forEach((value) => value.dispose());
  }

  /** Fill what the first call is fed with zeros. @param {number} batch */
  begin(batch) {
    const { capacity, contract, ort } = this.#model;
    for (const { past, dtype, zeros, heads } of contract.slots) {
      if (zeros !== null) {
        const shape = shapeOf(zeros, { batch, batch_heads: batch * heads, capacity });
        this.#values.set(past, tensor(ort, typeName(dtype), new ARRAYS[dtype](product(shape)), shape));
      }
    }
  }

  /**
   * Take over what a call returned of the cache.
   *
   * @param {Call} call
   * @param {Values} outputs
   * @param {number} length - tokens before the call
   */
  async carry({ fills }, outputs, length) {
    const { slots } = this.#model.contract;
    const next = fills.map(({ slot, output, carry }) => {
      const { past, length_axis: axis } = slots[slot];
      return /** @type {const} */ ([past, this.#next(this.#values.get(past), outputs[output], carry, axis, length)]);
    });
    await this.#replace(next);
  }

  /** Cut the cache to its first tokens. @param {number} length */
  async cut(length) {
    const slots = this.#model.contract.slots.filter(({ rewinds }) => rewinds === "cut");
    await this.#replace(slots.map((slot) => this.#chosen(slot.past, slot.length_axis, [[0, length]])));
  }

  /** Make row i of the batch a copy of what row `rows[i]` was. @param {readonly number[]} rows */
  async reorder(rows) {
    const { slots, source } = this.#model.contract;
    const next = [...this.#values.keys()].map((past) => {
      const ofEncoder = { batch_axis: past === SOURCE ? (source?.batch_axis ?? 0) : 0, heads: 1 };
      const { batch_axis, heads } = slots.find((slot) => slot.past === past) ?? ofEncoder;
      const entries = rows.map((row) => /** @type {const} */ ([row * heads, (row + 1) * heads]));
      return this.#chosen(past, batch_axis, entries);
    });
    await this.#replace(next);
  }

  /**
   * A value with entries of its own along an axis, where it is there and has one.
   *
   * @param {string} past
   * @param {number | null} axis
   * @param {readonly (readonly [from: number, to: number])[]} entries
   */
  #chosen(past, axis, entries) {
    const value = this.#values.get(past);
    const pieces = entries.map(([from, to]) => /** @type {const} */ ([/** @type {Tensor} */ (value), from, to]));
    return /** @type {const} */ ([past, value && axis !== null ? this.#join(axis, pieces) : undefined]);
  }

  /**
   * Replace the values for which there are others, after all that could fail.
   *
   * @param {readonly (readonly [past: string, value: Tensor | Promise<Tensor> | undefined])[]} next
   */
  async #replace(next) {
    const values = await Promise.all(next.map(([, value]) => value));
    for (const [at, value] of values.entries()) {
      const [past] = next[at];
      const before = this.#values.get(past);
      if (value !== undefined && value !== before) {
        this.#values.set(past, value);
        this.#release(before);
      }
    }
  }

  /**
   * The next past of a slot: the output itself, or what the loop makes of it.
   *
   * @param {Tensor | undefined} past
   * @param {Tensor} present
   * @param {string} carry
   * @param {number | null} axis
   * @param {number} length - tokens before the call
   */
  #next(past, present, carry, axis, length) {
    if (past === undefined || axis === null || carry === "feed-back") {
      return present;
    }
    const [size, count] = [past.dims[axis], present.dims[axis]];
    const added = /** @type {const} */ ([present, 0, count]);
    switch (carry) {
      case "append":
        return this.#join(axis, [[past, 0, size], added]);
      case "shift": // the oldest entries leave on one side, the new ones come in on the other
        return this.#join(axis, [[past, count, size], added]);
      case "drop-oldest":
        return this.#join(axis, [[present, 1, count]]);
    }
    if (past.location === "cpu" && present.location === "cpu") {
      write(past, present, axis, length);
      return past;
    }
    return this.#join(axis, [[past, 0, length], added, [past, length + count, size]]);
  }

  /** @param {number} axis @param {Parameters<typeof join>[2]} pieces */
  #join(axis, pieces) {
    return join(this.#model.ort, axis, pieces);
  }

  /** Give back a value, unless `encode` made it. @param {Tensor | undefined} value */
  #release(value) {
    if (![...this.#encoded.values()].includes(/** @type {Tensor} */ (value))) {
      value?.dispose();
    }
  }
}
