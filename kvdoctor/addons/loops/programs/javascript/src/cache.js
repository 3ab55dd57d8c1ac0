// The values of one batch of sequences: what a call returns becomes what the next one is fed.

import { copy, join, shapeOf, tensor } from "./tensors.js";

/** @import { Runtime, Tensor } from "./tensors.js" */
/** @import { Contract, Moment, Take, Values } from "./types.js" */

/** Values by the names that the contract has for them; one is disposed of as soon as another one has replaced it. */
export class Cache {
  /** @type {Map<string, Tensor>} */ #values = new Map();

  /** @param {Runtime} ort @param {Cache} [encoded] - values that are there until others replace them, and stay */
  constructor(ort, encoded) {
    this.ort = ort;
    this.encoded = encoded;
  }

  /** @param {string} name @returns {Tensor | undefined} */
  get(name) {
    return this.#values.get(name) ?? this.encoded?.get(name);
  }

  /** Replace values by others. @param {Iterable<readonly [name: string, value: Tensor]>} next */
  set(next) {
    for (const [name, value] of next) {
      const before = this.#values.get(name);
      this.#values.set(name, value);
      if (before !== value) {
        before?.dispose();
      }
    }
  }

  /** Forget all values. */
  clear() {
    const values = [...this.#values.values()];
    this.#values.clear();
    values.forEach((value) => value.dispose());
  }

  /** Take zeros, before the first call. @param {Contract["zeros"]} zeros @param {Moment["sizes"]} sizes */
  begin(zeros, sizes) {
    this.set(zeros.map(({ value, dtype, dims }) => [value, tensor(this.ort, dtype, shapeOf(dims, sizes))]));
  }

  /**
   * Take over what a call returned, after all that could fail.
   *
   * @param {readonly Take[]} takes
   * @param {Values} outputs
   * @param {number} length - tokens before the call
   */
  async take(takes, outputs, length) {
    await this.#change(takes, (take, past) => this.#next(take, past, outputs[take.output], length));
  }

  /** Cut values to their first entries along an axis. @param {Contract["cut"]} axes @param {number} length */
  async cut(axes, length) {
    await this.#change(axes, ({ axis }, past) => join(this.ort, axis, [[past, 0, length]]));
  }

  /** Make row i of each value a copy of what row `rows[i]` was. @param {Contract["rows"]} axes @param {readonly number[]} rows */
  async reorder(axes, rows) {
    await this.#change(axes, ({ axis, each }, past) =>
      join(
        this.ort,
        axis,
        rows.map((row) => [past, row * each, (row + 1) * each]),
      ),
    );
  }

  /**
   * Replace values by what a function makes of them.
   *
   * @template {{ value: string }} Change
   * @param {readonly Change[]} changes
   * @param {(change: Change, past: Tensor) => Tensor | Promise<Tensor>} make
   */
  async #change(changes, make) {
    const made = changes.map((change) => make(change, /** @type {Tensor} */ (this.get(change.value))));
    const values = await Promise.all(made);
    this.set(changes.map(({ value }, at) => [value, values[at]]));
  }

  /**
   * The next value: the output itself, or what the loop makes of it.
   *
   * @param {Take} take
   * @param {Tensor} past
   * @param {Tensor} present
   * @param {number} length - tokens before the call
   */
  #next({ carry, axis }, past, present, length) {
    if (axis === null) {
      return present;
    }
    const count = present.dims[axis];
    if (carry === "drop-oldest") {
      return join(this.ort, axis, [[present, 1, count]]);
    }
    const size = past.dims[axis];
    if (carry !== "write") {
      // Of a window the oldest entries leave on one side, as the new ones come in on the other.
      const kept = /** @type {const} */ ([past, carry === "shift" ? count : 0, size]);
      return join(this.ort, axis, [kept, [present, 0, count]]);
    }
    if (past.location === "cpu" && present.location === "cpu") {
      copy(axis, past, length, present, 0, count);
      return past;
    }
    return join(this.ort, axis, [
      [past, 0, length],
      [present, 0, count],
      [past, length + count, size],
    ]);
  }
}
