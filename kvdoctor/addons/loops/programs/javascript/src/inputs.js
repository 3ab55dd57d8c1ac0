// What a call is fed besides the cache, by the rules of the contract.

import { ARRAYS, element, product } from "./tensors.js";

/** @import { Dim, Input, Moment, Sizes } from "./types.js" */
/** @typedef {(data: any, input: Input, moment: Moment, shape: number[]) => void} Make Fills data that is made of zeros. */

/** @type {Readonly<Record<string, Make>>} */
const MADE = {
  tokens: (data, { dtype }, { tokens }) => set(data, dtype, tokens.flat()),
  "token-and-position": (data, { dtype }, { tokens, sizes }) => {
    const pairs = tokens.flatMap(([id]) => [id, sizes["past"]]);
    set(data, dtype, pairs);
  },
  rows: (data, { dtype }) => set(data, dtype, [...data.keys()]),
  number: (data, { dtype, count, value }, { sizes }) => data.fill(element(dtype, sizes[count] + value)),
  "attention-mask": mask,
  "window-mask": mask,
  "padding-mask": mask,
  "causal-mask": mask,
  positions: (data, input, { sizes, padding }, shape) => {
    const columns = shape[shape.length - 1];
    for (let at = 0; at < data.length; at++) {
      const padded = padding[sequenceOf(input, shape, at)] ?? 0;
      data[at] = element(input.dtype, Math.max(sizes["past"] + (at % columns) - padded, 0));
    }
  },
  "encoder-mask": (data, { dtype }, { mask }, [rows, columns]) => {
    // A mask of another length belongs to the input of the encoder alone.
    const given = mask?.length === rows && mask[0].length === columns;
    return given ? set(data, dtype, mask.flat()) : data.fill(element(dtype, 1));
  },
};

/** The rules of inputs. */
export const RULES = [...Object.keys(MADE), "embeddings", "encoder-input", "encoder-states"];

/** The sizes of a shape; an axis that no loop counts has size 1. @param {readonly Dim[]} dims @param {Sizes} sizes */
export function shapeOf(dims, sizes) {
  return dims.map((dim) => (typeof dim === "number" ? dim : (sizes[dim] ?? 1)));
}

/**
 * The value of an input that is made of sizes and tokens.
 *
 * @param {Input} input
 * @param {Moment} moment
 * @returns {[data: any, shape: number[]]}
 */
export function makeInput(input, moment) {
  const shape = shapeOf(input.dims, moment.sizes);
  const data = new ARRAYS[input.dtype](product(shape));
  MADE[input.rule](data, input, moment, shape);
  return [data, shape];
}

/** @param {any} data @param {string} dtype @param {readonly number[]} values */
function set(data, dtype, values) {
  values.forEach((value, at) => (data[at] = element(dtype, value)));
}

/** The sequence that an element is of; -1 where it is of all. @param {Input} input @param {number[]} shape @param {number} at */
function sequenceOf({ batch_axis: axis }, shape, at) {
  return axis === null ? -1 : Math.floor(at / product(shape.slice(axis + 1))) % shape[axis];
}

/** What is seen: from the first token to the last one, or in a row to its own token. @type {Make} */
function mask(data, input, { sizes, padding }, shape) {
  const [queries, columns] = [shape.at(-2) ?? 1, shape[shape.length - 1]];
  const oldest = input.from_right ? columns - sizes["total"] : 0; // where the newest token is in the last column
  /** @param {number} column */
  const place = (column) => Math.min(Math.max(oldest + column, 0), columns);
  const from = input.rows_from;
  const shown = element(input.dtype, input.shown);
  data.fill(element(input.dtype, input.hidden));
  for (let row = 0; row * columns < data.length; row++) {
    const padded = padding[sequenceOf(input, shape, row * columns)] ?? 0;
    const [begin, end] = from === null ? [padded, sizes["total"]] : [0, sizes[from] + (row % queries) + 1];
    data.fill(shown, row * columns + place(begin), row * columns + place(end));
  }
}
