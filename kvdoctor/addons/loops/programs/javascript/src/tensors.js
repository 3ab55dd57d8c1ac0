// Arrays of tensors: their element types, and the parts of them that a loop moves.

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

/**
 * A tensor of the runtime.
 *
 * @param {Runtime} ort
 * @param {string} type - as the runtime spells it
 * @param {any} data
 * @param {readonly number[]} shape
 * @returns {Tensor}
 */
export function tensor(ort, type, data, shape) {
  return new ort.Tensor(/** @type {"float32"} */ (type), data, shape);
}

/**
 * A tensor of pieces of others, one after the other along an axis: bytes are copied, whatever their type.
 *
 * @param {Runtime} ort
 * @param {number} axis
 * @param {readonly (readonly [value: Tensor, from: number, to: number])[]} pieces
 */
export async function join(ort, axis, pieces) {
  const [{ type, dims }] = pieces[0];
  const parts = [];
  for (const [value, from, to] of pieces) {
    // One after the other: a tensor may be in several pieces, and is taken off a device only once.
    const data = /** @type {Uint8Array} */ (await value.getData());
    parts.push({ data, bytes: bytesOf(data), from, to, size: value.dims[axis] });
  }
  const size = parts.reduce((sum, { from, to }) => sum + to - from, 0);
  const shape = dims.map((dim, at) => (at === axis ? size : dim));
  const Elements = /** @type {Uint8ArrayConstructor} */ (parts[0].data.constructor);
  const joined = new Elements(product(shape));
  const bytes = bytesOf(joined);
  const width = Elements.BYTES_PER_ELEMENT * product(dims.slice(axis + 1));
  let end = 0;
  for (let block = 0; block < product(dims.slice(0, axis)); block++) {
    for (const part of parts) {
      const start = block * part.size;
      const piece = part.bytes.subarray((start + part.from) * width, (start + part.to) * width);
      bytes.set(piece, end);
      end += piece.length;
    }
  }
  return tensor(ort, type, joined, shape);
}

/**
 * Write a tensor into another one, from a place of an axis on; both are in the memory of JavaScript.
 *
 * @param {Tensor} into
 * @param {Tensor} value
 * @param {number} axis
 * @param {number} from
 */
export function write(into, value, axis, from) {
  const [target, bytes] = [into, value].map(({ data }) => bytesOf(/** @type {Uint8Array} */ (data)));
  const blocks = product(into.dims.slice(0, axis));
  const [stride, size] = [target.length / blocks, bytes.length / blocks];
  const start = (stride / into.dims[axis]) * from;
  for (let block = 0; block < blocks; block++) {
    target.set(bytes.subarray(block * size, (block + 1) * size), block * stride + start);
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
  const exponent = (bits >> 10) & 0x1f;
  const fraction = (bits & 0x3ff) / 1024;
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
