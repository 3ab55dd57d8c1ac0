// The cache of one batch of sequences: what a call returns becomes what the next one is fed.

import { shapeOf } from "./inputs.js";
import { SOURCE, STATES } from "./model.js";
import { ARRAYS, join, product, tensor, typeName, write } from "./tensors.js";

/** @import { Model } from "./model.js" */
/** @import { Tensor } from "./tensors.js" */
/** @import { Slot, Values } from "./types.js" */

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

  /** The sizes of the source; undefined before `encode`. */
  get sourceSizes() {
    const shape = this.#encoded.get(SOURCE)?.dims;
    return shape && this.sizesOf(shape);
  }

  /** The sizes of a source. @param {readonly number[]} shape */
  sizesOf(shape) {
    const dims = this.#model.contract.source?.dims ?? [];
    const length = dims.findIndex((dim) => dim === "encoder_input" || dim === "encoder"); // else the last one
    return { batch: shape[Math.max(dims.indexOf("batch"), 0)], encoder_input: shape.at(length) ?? 1 };
  }

  /** The number of encoder states that a call is about. @param {boolean} first */
  encoderLength(first) {
    const { calls, source, slots } = this.#model.contract;
    if (calls.encode?.states != null || source?.rule === "encoder-states") {
      return this.#values.get(STATES)?.dims[1] ?? 0;
    }
    const slot = slots.find(({ counts_states }) => counts_states);
    const counted = slot?.length_axis != null && (slot.by_encoder || !first);
    const dims = counted ? this.#values.get(slot.past)?.dims : undefined;
    return dims?.[slot?.length_axis ?? 0] ?? this.sourceSizes?.encoder_input ?? 0;
  }

  /** Hold what `encode` was given or made, for every prefill after it. @param {Values} values */
  hold(values) {
    Object.entries(values).forEach(([name, value]) => this.#encoded.set(name, value));
    this.clear();
  }

  /** Forget the sequences. */
  clear() {
    const { calls, slots } = this.#model.contract;
    const before = [...this.#values.values()];
    const states = calls.encode === null ? SOURCE : (calls.encode.states ?? "");
    const ofEncoder = slots.filter((slot) => slot.by_encoder).map((slot) => [slot.past, slot.made ?? ""]);
    this.#values.clear();
    for (const [past, made] of [[SOURCE, SOURCE], [STATES, states], ...ofEncoder]) {
      const value = this.#encoded.get(made);
      if (value !== undefined) {
        this.#values.set(past, value);
      }
    }
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
    for (const { past, dims, dtype, first_length: length, heads } of contract.slots.filter((slot) => slot.fed_zeros)) {
      const sizes = { batch, batch_heads: batch * heads, past: length, encoder: length, capacity };
      const shape = shapeOf(dims, sizes);
      this.#values.set(past, tensor(ort, typeName(dtype), new ARRAYS[dtype](product(shape)), shape));
    }
  }

  /**
   * Take over what a call returned of the cache.
   *
   * @param {Values} outputs
   * @param {number} length - tokens before the call
   */
  async carry(outputs, length) {
    const next = this.#model.contract.slots.map((slot) => {
      const name = length > 0 ? slot.present : slot.by_encoder ? null : slot.made;
      return /** @type {const} */ ([slot.past, name === null ? undefined : this.#next(slot, outputs[name], length)]);
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
    const single = rows.map((row) => /** @type {const} */ ([row, row + 1]));
    const next = slots.map(({ past, batch_axis: axis, dims, heads }) => {
      const several = rows.map((row) => /** @type {const} */ ([row * heads, (row + 1) * heads]));
      return this.#chosen(past, axis, axis !== null && dims[axis] === "batch_heads" ? several : single);
    });
    next.push(this.#chosen(STATES, 0, single));
    next.push(this.#chosen(SOURCE, Math.max(source?.dims.indexOf("batch") ?? 0, 0), single));
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
   * @param {Slot} slot
   * @param {Tensor} present
   * @param {number} length - tokens before the call
   */
  #next({ past: name, carry, length_axis: axis }, present, length) {
    const past = this.#values.get(name);
    if (past === undefined || axis === null || carry === "feed-back" || carry === "hold") {
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
