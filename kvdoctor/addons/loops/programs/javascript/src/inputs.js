// What a call is fed besides the cache, by the rules of the contract.

import { ARRAYS, element, product } from "./tensors.js";

/** @import { Dim, Input } from "./contract.js" */
/** @import { Elements } from "./tensors.js" */

/** @typedef {readonly (readonly number[])[]} Tokens Token ids, a list for each sequence of the batch. */
/** @typedef {Readonly<Record<string, number>>} Sizes Those of the axes, by their names. */

/**
 * What a call is made for.
 *
 * @typedef {object} Moment
 * @property {Sizes} sizes - Those of the axes.
 * @property {Tokens} tokens - The new ones.
 * @property {readonly number[]} padding - Of each sequence, on the left.
 * @property {Tokens} [mask] - The caller's, of the source.
 */

/**
 * The sizes of a shape; an axis that no loop counts has size 1.
 *
 * @param {readonly Dim[]} dims
 * @param {Sizes} sizes
 */
export function shapeOf(dims, sizes) {
  return dims.map((dim) => (typeof dim === "number" ? dim : (sizes[dim] ?? 1)));
}

/**
 * The value of an input that is made of sizes and tokens.
 *
 * @param {Input} input
 * @param {Moment} moment
 * @returns {[Elements, number[]]} its data and its shape
 */
export function makeInput(input, moment) {
  const shape = shapeOf(input.dims, moment.sizes);
  const data = new ARRAYS[input.dtype](product(shape));
  MADE[input.rule](data, input, moment, shape);
  return [data, shape];
}

/** @typedef {(data: Elements, input: Input, moment: Moment, shape: readonly number[]) => void} Make Fills the data. */

/** @type {Readonly<Record<string, Make>>} */
const MADE = {
  tokens: (data, { dtype }, { tokens }) => set(data, dtype, tokens.flat()),
  "token-and-position": (data, { dtype }, { tokens, sizes }) =>
    set(
      data,
      dtype,
      tokens.flatMap(([id]) => [id, sizes["past"]]),
    ),
  rows: (data, { dtype }) => set(data, dtype, [...Array(data.length).keys()]),
  number: (data, input, { sizes }) => data.fill(element(input.dtype, COUNTS[input.count](sizes, input))),
  "attention-mask": (...made) => maskTokens(1, ...made),
  "padding-mask": (...made) => maskTokens(0, ...made),
  "window-mask": (...made) => maskTokens(1, ...made),
  "causal-mask": maskFuture,
  positions: setPositions,
  "encoder-mask": (data, { dtype }, { mask }, [rows, columns]) => {
    // A mask of another length belongs to the input of the encoder alone.
    const given = mask?.length === rows && mask[0].length === columns;
    return given ? set(data, dtype, mask.flat()) : data.fill(element(dtype, 1));
  },
};

/** @type {Readonly<Record<string, (sizes: Sizes, input: Input) => number>>} */
const COUNTS = {
  constant: (_, { value }) => value,
  past: ({ past }) => past,
  total: ({ total }) => total,
  last: ({ total }) => total - 1,
  new: (sizes) => sizes["new"],
  "last-new": (sizes) => sizes["new"] - 1,
  cached: ({ past }) => Number(past > 0),
  first: ({ past }) => Number(past === 0),
  batch: ({ batch }) => batch,
  encoder_input: (sizes) => sizes["encoder_input"],
};

/** The rules of inputs, and what a number counts. */
export const RULES = [...Object.keys(MADE), "embeddings", "encoder-input", "encoder-states"];
export const NUMBERS = Object.keys(COUNTS);

/**
 * @param {Elements} data
 * @param {string} dtype
 * @param {readonly number[]} values
 */
function set(data, dtype, values) {
  for (let at = 0; at < values.length; at++) {
    data[at] = element(dtype, values[at]);
  }
}

/**
 * The padding of each row of an input: one row stands for all sequences, and cannot mark any.
 *
 * @param {Input} input
 * @param {Moment} moment
 */
function paddingOf({ dims }, { padding }) {
  return dims.includes("batch") ? padding : [0];
}

/**
 * A mark for tokens, its opposite for padding on the left and for what follows the last token.
 *
 * @type {(mark: 0 | 1, ...made: Parameters<Make>) => void}
 */
function maskTokens(mark, data, input, moment, shape) {
  const padding = paddingOf(input, moment);
  const columns = shape[shape.length - 1];
  // The last token of a window is in the last column.
  const oldest = input.rule === "window-mask" ? columns - moment.sizes["total"] : 0;
  const rows = data.length / columns / padding.length; // of each sequence
  if (mark === 0) {
    data.fill(element(input.dtype, 1)); // it is made of zeros
  }
  for (let row = 0; row * columns < data.length; row++) {
    const from = row * columns;
    const begin = from + Math.max(oldest + padding[Math.floor(row / rows)], 0);
    data.fill(element(input.dtype, mark), begin, from + Math.min(oldest + moment.sizes["total"], columns));
  }
}

/** The positions of the new tokens, not below 0; padding is not counted. @type {Make} */
function setPositions(data, input, moment) {
  const padding = paddingOf(input, moment);
  const { past, new: added } = moment.sizes;
  for (let at = 0; at < data.length; at++) {
    const padded = padding[Math.floor(at / added) % padding.length];
    data[at] = element(input.dtype, Math.max(past + (at % added) - padded, 0));
  }
}

/** Where a query may look: at its own position and at those before it. The rows are queries. @type {Make} */
function maskFuture(data, input, { sizes }, shape) {
  const [queries, columns] = shape.slice(-2);
  const before = input.dims.at(-2) === "total" ? 0 : sizes["past"];
  const oldest = input.from_right ? columns - sizes["total"] : 0;
  const shown = element(input.dtype, input.shown);
  data.fill(element(input.dtype, input.hidden));
  for (let row = 0; row * columns < data.length; row++) {
    const end = Math.min(oldest + before + (row % queries) + 1, columns);
    data.fill(shown, row * columns + Math.max(oldest, 0), row * columns + Math.max(end, 0));
  }
}
