// Tensors: their element types, those that are made for a call, and the parts that a loop moves.

/** @import { Dim, Made, Moment, Terms } from "./types.js" */
/** @typedef {import("onnxruntime-common").Tensor} Tensor */
/** @typedef {typeof import("onnxruntime-common")} Runtime onnxruntime-node, or onnxruntime-web. */
/** @typedef {import("onnxruntime-common").Tensor.DataType} Data */

/**
 * The arrays of the element types that ONNX Runtime for JavaScript has; of float16 its bits.
 *
 * @type {Readonly<Record<string, new (size: number) => any>>}
 */
export const ARRAYS = {
  float: Float32Array,
  double: Float64Array,
  float16: Uint16Array,
  int64: BigInt64Array,
  int32: Int32Array,
  int16: Int16Array,
  int8: Int8Array,
  uint64: BigUint64Array,
  uint32: Uint32Array,
  uint16: Uint16Array,
  uint8: Uint8Array,
  bool: Uint8Array,
};

/** An element type as the runtime spells it. @param {string} dtype @returns {string} */
export const typeName = (dtype) => ({ float: "float32", double: "float64" })[dtype] ?? dtype;

/** A number as an element of an array. @param {string} dtype @param {number} value */
export const element = (dtype, value) =>
  dtype === "float16" ? toHalf(value) : dtype.endsWith("int64") ? BigInt(value) : value;

/** The number of elements of a shape. @param {readonly number[]} shape */
export const product = (shape) => shape.reduce((elements, size) => elements * size, 1);

/** A shape; an axis that nothing counts has size 1. @param {readonly Dim[]} dims @param {Moment["sizes"]} sizes */
export const shapeOf = (dims, sizes) => dims.map((dim) => (typeof dim === "number" ? dim : (sizes[dim] ?? 1)));

/**
 * A tensor of the runtime; of zeros without data.
 *
 * @param {Runtime} ort
 * @param {string} dtype - as the contract spells it
 * @param {readonly number[]} shape
 * @param {any} [data]
 * @returns {Tensor}
 */
export function tensor(ort, dtype, shape, data = new ARRAYS[dtype](product(shape))) {
  return new ort.Tensor(/** @type {"float32"} */ (typeName(dtype)), data, shape);
}

/** The value of an input that is made for a call. @param {Runtime} ort @param {Made} made @param {Moment} moment */
export function makeInput(ort, { dtype, dims, batch_axis: axis, ...made }, { sizes, rows, padding }) {
  const shape = shapeOf(dims, sizes);
  const data = new ARRAYS[dtype](product(shape));
  const last = shape.length - 1;
  const columns = last < 0 || axis === last ? 1 : shape[last];
  const each = axis === null ? 0 : product(shape.slice(axis + 1, last));
  const copied = made.copy === null ? undefined : rows[made.copy];
  for (let row = 0; row * columns < data.length; row++) {
    const sequence = axis === null ? 0 : Math.floor(row / each) % shape[axis];
    const padded = (axis !== null && padding[sequence]) || 0;
    const of = { ...sizes, columns, query: row % (shape[last - 1] ?? 1), sequence, padding: padded };
    const [begin, end] = [made.begin, made.end].map((terms) => Math.min(Math.max(sum(terms, of), 0), columns));
    const [first, inside] = [row * columns, sum(made.inside, of)];
    data.fill(element(dtype, made.outside), first, first + columns);
    data.fill(element(dtype, inside), first + begin, first + end);
    for (let column = begin; made.step !== 0 && column < end; column++) {
      data[first + column] = element(dtype, inside + made.step * column);
    }
    if (copied !== undefined && copied[sequence].length <= columns) {
      copied[sequence].forEach((value, column) => (data[first + column] = element(dtype, value)));
    }
  }
  return tensor(ort, dtype, shape, data);
}

/** @param {Terms} terms @param {Readonly<Record<string, number>>} sizes */
const sum = (terms, sizes) => Object.entries(terms).reduce((sum, [name, factor]) => sum + sizes[name] * factor, 0);

/**
 * A tensor of pieces of others, one after the other along an axis.
 *
 * @param {Runtime} ort
 * @param {number} axis
 * @param {readonly (readonly [value: Tensor, from: number, to: number])[]} pieces
 */
export async function join(ort, axis, pieces) {
  for (const [value] of pieces) {
    await value.getData(); // off a device, if it is there; in turn, as one tensor may be in several pieces
  }
  const [{ type, dims, data }] = pieces[0];
  const size = pieces.reduce((sum, [, from, to]) => sum + to - from, 0);
  const shape = dims.map((dim, at) => (at === axis ? size : dim));
  const Elements = /** @type {Uint8ArrayConstructor} */ (data.constructor);
  /** @type {Tensor} */
  const joined = new ort.Tensor(/** @type {"uint8"} */ (type), new Elements(product(shape)), shape);
  pieces.reduce((at, [value, from, to]) => (copy(axis, joined, at, value, from, to), at + to - from), 0);
  return joined;
}

/**
 * Copy entries of a tensor along an axis into another one, from a place on: their bytes, whatever their type. Both are
 * in the memory of JavaScript.
 *
 * @param {number} axis
 * @param {Tensor} target
 * @param {number} at
 * @param {Tensor} value
 * @param {number} from
 * @param {number} to
 */
export function copy(axis, target, at, value, from, to) {
  const [into, bytes] = [target, value].map(({ data }) => bytesOf(/** @type {Uint8Array} */ (data)));
  const blocks = product(target.dims.slice(0, axis));
  const width = into.length / blocks / target.dims[axis];
  for (let block = 0; block < blocks; block++) {
    const start = block * value.dims[axis];
    into.set(bytes.subarray((start + from) * width, (start + to) * width), (block * target.dims[axis] + at) * width);
  }
}

/** @param {Uint8Array} data - or another typed array */
function bytesOf({ buffer, byteOffset, byteLength }) {
  return new Uint8Array(buffer, byteOffset, byteLength);
}

/** @param {Uint16Array | Float32Array} data - or a Float16Array */
function bitsOf({ buffer, byteOffset, length }) {
  return new Uint16Array(buffer, byteOffset, length);
}

/**
 * The numbers of a part of a tensor's data.
 *
 * @param {string} type - as the runtime spells it
 * @param {Data} data
 * @param {number} from
 * @param {number} to
 */
export function numbers(type, data, from, to) {
  const part = /** @type {Float32Array} */ (data).subarray(from, to);
  if (type === "float16") {
    const table = (halves ??= Float32Array.from({ length: 1 << 16 }, (_, bits) => fromHalf(bits)));
    const found = new Float32Array(part.length);
    bitsOf(part).forEach((bits, at) => (found[at] = table[bits]));
    return found;
  }
  return type === "float32" ? part : Float32Array.from(part, Number);
}

/** @type {Float32Array | undefined} The numbers of all float16, by their bits. */
let halves;

/**
 * Some numbers of a tensor's data: all where there are at most 64, else 64 from the first to the last.
 *
 * @param {string} type - as the runtime spells it
 * @param {Data} data
 */
export function sample(type, data) {
  const values = type === "float16" ? bitsOf(/** @type {Uint16Array} */ (data)) : data;
  return Array.from({ length: Math.min(data.length, 64) }, (_, at) => {
    const value = Number(values[data.length > 64 ? Math.floor((at * (data.length - 1)) / 63) : at]);
    return type === "float16" ? fromHalf(value) : value;
  });
}

/**
 * Let tensors of float16 hold their bits as Uint16Array, without a copy.
 *
 * Where JavaScript has Float16Array, onnxruntime-common makes one, and onnxruntime-node 1.30.0 does not take it.
 *
 * @param {Readonly<Record<string, Tensor>>} values
 */
export function useBits(values) {
  for (const value of Object.values(values)) {
    if (value?.type === "float16" && value.location === "cpu") {
      const bits = bitsOf(/** @type {Uint16Array} */ (value.data));
      Object.defineProperty(value, "data", { value: bits, configurable: true });
    }
  }
}

/** The number of the bits of a float16. @param {number} bits */
function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const [exponent, fraction] = [(bits >> 10) & 0x1f, (bits & 0x3ff) / 1024];
  if (exponent === 0x1f) {
    return fraction ? NaN : sign * Infinity;
  }
  return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
}

/** The bits of the float16 that is nearest to a number. @param {number} value */
function toHalf(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(size) || size >= 65520) {
    return sign | (Number.isNaN(size) ? 0x7e00 : 0x7c00);
  }
  const exponent = Math.max(Math.floor(Math.log2(size)), -14);
  const steps = size / 2 ** (exponent - 10);
  const rounded = Math.round(steps);
  const even = steps % 1 === 0.5 && rounded % 2 === 1 ? rounded - 1 : rounded; // ties to even
  return sign | ((exponent + 14) * 1024 + even);
}
