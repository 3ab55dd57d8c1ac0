// The cache of one batch of sequences: what a call returns becomes what the next one is fed.

import { shapeOf } from "./inputs.js";
import { SOURCE, STATES } from "./model.js";
import { ARRAYS, join, product, tensor, write } from "./tensors.js";

/** @import { Slot } from "./contract.js" */
/** @import { Model, Values } from "./model.js" */
/** @import { Tensor } from "./tensors.js" */

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

  /**
   * The sizes of a source.
   *
   * @param {readonly number[]} shape
   */
  sizesOf(shape) {
    const dims = this.#model.contract.source?.dims ?? [];
    const length = dims.findIndex((dim) => dim === "encoder_input" || dim === "encoder"); // else the last one
    return { batch: shape[Math.max(dims.indexOf("batch"), 0)], encoder_input: shape.at(length) ?? 1 };
  }

  /**
   * The number of encoder states that a call is about.
   *
   * @param {boolean} first
   */
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

  /**
   * Hold what `encode` was given or made, for every prefill after it.
   *
   * @param {Values} values
   */
  hold(values) {
    for (const [name, value] of Object.entries(values)) {
      this.#encoded.set(name, value);
    }
    this.clear();
  }

  /** Forget the sequences. */
  clear() {
    const { encode } = this.#model.contract.calls;
    const before = [...this.#values.values()];
    const states = encode === null ? SOURCE : (encode.states ?? "");
    const slots = this.#model.contract.slots.filter((slot) => slot.by_encoder);
    this.#values.clear();
    for (const [past, made] of [
      [SOURCE, SOURCE],
      [STATES, states],
      ...slots.map((slot) => [slot.past, slot.made ?? ""]),
    ]) {
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

  /**
   * Fill what the first call is fed with zeros.
   *
   * @param {number} batch
   */
  begin(batch) {
    const { capacity, contract, ort } = this.#model;
    for (const { past, dims, dtype, fed_zeros, first_length: length, heads } of contract.slots) {
      if (fed_zeros) {
        const shape = shapeOf(dims, {
          batch,
          batch_heads: batch * heads,
          past: length,
          encoder: length,
          capacity,
        });
        this.#values.set(past, tensor(ort, dtype, new ARRAYS[dtype](product(shape)), shape));
      }
    }
  }

  /**
   * Take over what a call returned of the cache.
   *
   * @param {Values} outputs
   * @param {number} length - tokens before the call
   */
  async carry(outputs, length) {
    /** @type {[string, Tensor][]} */
    const next = [];
    for (const slot of this.#model.contract.slots) {
      const name = length > 0 ? slot.present : slot.by_encoder ? null : slot.made;
      if (name !== null) {
        const value = this.#next(slot, outputs[name], length);
        next.push([slot.past, value instanceof Promise ? await value : value]);
      }
    }
    this.#replace(next);
  }

  /**
   * Cut the cache to its first tokens.
   *
   * @param {number} length
   */
  async cut(length) {
    const { contract, ort } = this.#model;
    /** @type {[string, Tensor][]} */
    const next = [];
    for (const { past, rewinds, length_axis: axis } of contract.slots) {
      const value = this.#values.get(past);
      if (value !== undefined && rewinds === "cut" && axis !== null) {
        next.push([past, await join(ort, axis, [[value, 0, length]])]);
      }
    }
    this.#replace(next);
  }

  /**
   * Make row i of the batch a copy of what row `rows[i]` was.
   *
   * @param {readonly number[]} rows
   */
  async reorder(rows) {
    const { contract, ort } = this.#model;
    const axis = Math.max(contract.source?.dims.indexOf("batch") ?? 0, 0);
    /** @type {[string, Tensor][]} */
    const next = [];
    for (const { past, batch_axis, dims, heads } of [
      ...contract.slots,
      { past: STATES, batch_axis: 0, dims: [], heads: 1 },
      { past: SOURCE, batch_axis: axis, dims: [], heads: 1 },
    ]) {
      const value = this.#values.get(past);
      if (value !== undefined && batch_axis !== null) {
        const size = dims[batch_axis] === "batch_heads" ? heads : 1;
        const pieces = rows.map((row) => /** @type {const} */ ([value, row * size, (row + 1) * size]));
        next.push([past, await join(ort, batch_axis, pieces)]);
      }
    }
    this.#replace(next);
  }

  /**
   * Replace parts of the cache, after all that could fail.
   *
   * @param {readonly [past: string, value: Tensor][]} next
   */
  #replace(next) {
    for (const [past, value] of next) {
      const before = this.#values.get(past);
      this.#values.set(past, value);
      if (before !== value) {
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
   * @returns {Tensor | Promise<Tensor>}
   */
  #next({ past: name, carry, length_axis: axis }, present, length) {
    const { ort } = this.#model;
    const past = this.#values.get(name);
    if (past === undefined || axis === null || carry === "feed-back" || carry === "hold") {
      return present;
    }
    const [size, count] = [past.dims[axis], present.dims[axis]];
    switch (carry) {
      case "append":
        return join(ort, axis, [
          [past, 0, size],
          [present, 0, count],
        ]);
      case "shift": // the oldest entries leave on one side, the new ones come in on the other
        return join(ort, axis, [
          [past, count, size],
          [present, 0, count],
        ]);
      case "drop-oldest":
        return join(ort, axis, [[present, 1, count]]);
    }
    if (past.location === "cpu" && present.location === "cpu") {
      write(past, present, axis, length);
      return past;
    }
    return join(ort, axis, [
      [past, 0, length],
      [present, 0, count],
      [past, length + count, size],
    ]);
  }

  /**
   * Give back a value, unless `encode` made it.
   *
   * @param {Tensor | undefined} value
   */
  #release(value) {
    for (const encoded of this.#encoded.values()) {
      if (encoded === value) {
        return;
      }
    }
    value?.dispose();
  }
}
