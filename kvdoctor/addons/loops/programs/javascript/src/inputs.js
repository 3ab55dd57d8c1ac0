// What a call is fed besides the cache, by the rules of the contract.

import { ARRAYS, element, product } from "./tensors.js";

/** @import { Dim, Input, Moment, Sizes } from "./types.js" */

/** What a number counts. @type {Readonly<Record<string, (sizes: Sizes, input: Input) => number>>} */
export const COUNTS = {
  constant: (_, { value }) => value,
  past: (sizes) => sizes["past"],
  total: (sizes) => sizes["total"],
  last: (sizes) => sizes["total"] - 1,
  new: (sizes) => sizes["new"],
  "last-new": (sizes) => sizes["new"] - 1,
  cached: (sizes) => Number(sizes["past"] > 0),
  first: (sizes) => Number(sizes["past"] === 0),
  batch: (sizes) => sizes["batch"],
  encoder_input: (sizes) => sizes["encoder_input"],
};

/** @typedef {(data: any, input: Input, moment: Moment, shape: number[]) => void} Make Fills data that is made of zeros. */

/** @type {Readonly<Record<string, Make>>} */
const MADE = {
  tokens: (data, { dtype }, { tokens }) => set(data, dtype, tokens.flat()),
  "token-and-position": (data, { dtype }, { tokens, sizes }) => {
    const pairs = tokens.flatMap(([id]) => [id, sizes["past"]]);
    set(data, dtype, pairs);
  },
  rows: (data, { dtype }) => set(data, dtype, [...data.keys()]),
  number: (data, input, { sizes }) => data.fill(element(input.dtype, COUNTS[input.count](sizes, input))),
  "attention-mask": (data, input, moment, shape) => mask(data, { ...input, shown: 1, hidden: 0 }, moment, shape),
  "window-mask": (data, input, moment, shape) =>
    mask(data, { ...input, shown: 1, hidden: 0, from_right: true }, moment, shape),
  "padding-mask": (data, input, moment, shape) => mask(data, { ...input, shown: 0, hidden: 1 }, moment, shape),
  "causal-mask": mask,
  positions: (data, input, moment) => {
    const padding = paddingOf(input, moment);
    const { past, new: added } = moment.sizes;
    for (let at = 0; at < data.length; at++) {
      const padded = padding[Math.floor(at / added) % padding.length];
      data[at] = element(input.dtype, Math.max(past + (at % added) - padded, 0));
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

/**
 * The padding of each sequence; one row stands for all, and cannot mark any.
 *
 * @param {Input} input
 * @param {Moment} moment
 */
function paddingOf({ dims, rule }, { padding }) {
  return dims.includes("batch") && rule !== "causal-mask" ? padding : [0];
}

/** `shown` from the first token on, up to the last one, or in a causal mask up to the query. @type {Make} */
function mask(data, input, moment, shape) {
  const [queries, columns] = [shape.at(-2) ?? 1, shape[shape.length - 1]];
  const { past, total } = moment.sizes;
  const padding = paddingOf(input, moment);
  const repeated = data.length / columns / padding.length; // rows of each sequence
  const oldest = input.from_right ? columns - total : 0; // where the newest token is in the last column
  const before = input.dims.at(-2) === "total" ? 0 : past;
  const [shown, hidden] = [input.shown, input.hidden].map((value) => element(input.dtype, value));
  data.fill(hidden);
  for (let row = 0; row * columns < data.length; row++) {
    const end = input.rule === "causal-mask" ? before + (row % queries) + 1 : total;
    const [from, to] = [oldest + padding[Math.floor(row / repeated)], oldest + end];
    data.fill(shown, row * columns + Math.max(from, 0), row * columns + Math.max(Math.min(to, columns), 0));
  }
}
