package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.platform.Fp16Conversions;
import com.google.gson.JsonPrimitive;
import decodeloop.Contract.Made;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.IntToDoubleFunction;
import java.util.stream.LongStream;

/** Tensors that are made for a call, and from parts of others; their elements. */
final class Tensors {
  private static final OrtEnvironment ENVIRONMENT = OrtEnvironment.getEnvironment();

  private Tensors() {}

  /** A shape with the sizes that are known; an axis that nothing counts has one entry. */
  static long[] resolve(List<JsonPrimitive> dims, Map<String, Long> sizes) {
    return dims.stream()
        .mapToLong(d -> d.isNumber() ? d.getAsLong() : sizes.getOrDefault(d.getAsString(), 1L))
        .toArray();
  }

  static OnnxTensor zeros(String dtype, long[] shape) throws OrtException {
    OnnxJavaType type = Contract.typeOf(dtype);
    return OnnxTensor.createTensor(ENVIRONMENT, buffer(count(shape) * type.size), shape, type);
  }

  /** A tensor whose element i is {@code at(i)}. */
  static OnnxTensor fill(String dtype, long[] shape, IntToDoubleFunction at) throws OrtException {
    OnnxJavaType type = Contract.typeOf(dtype);
    ByteBuffer data = buffer(count(shape) * type.size);
    for (int i = 0; i < count(shape); i++) {
      write(data, type, i, at.applyAsDouble(i));
    }
    return OnnxTensor.createTensor(ENVIRONMENT, data, shape, type);
  }

  /**
   * What inputs are made for.
   *
   * @param sizes what axes and sums count
   * @param rows what inputs copy: tokens, and the mask of the source
   * @param padding of each sequence, on the left
   */
  record Step(Map<String, Long> sizes, Map<String, int[][]> rows, int[] padding) {}

  /** An input of a call. */
  static OnnxTensor make(Made made, Step step) throws OrtException {
    long[] shape = resolve(made.dims(), step.sizes);
    int last = shape.length - 1;
    Integer axis = made.batchAxis();
    int columns = last < 0 || axis != null && axis == last ? 1 : (int) shape[last];
    // Rows from one sequence to the next.
    int each = axis == null || axis >= last ? 1 : count(Arrays.copyOfRange(shape, axis + 1, last));
    int[][] rows = made.copy() == null ? null : step.rows.get(made.copy());
    OnnxJavaType type = Contract.typeOf(made.dtype());
    ByteBuffer data = buffer(count(shape) * type.size);
    Map<String, Long> sizes = new HashMap<>(step.sizes);
    sizes.put("columns", (long) columns);
    for (int row = 0; row * columns < count(shape); row++) {
      int sequence = axis == null ? 0 : row / each % Math.toIntExact(shape[axis]);
      boolean padded = axis != null && step.padding.length > 0;
      sizes.put("sequence", (long) sequence);
      sizes.put("padding", padded ? step.padding[sequence] : 0L);
      sizes.put("query", last < 1 ? 0 : row % shape[last - 1]);
      double begin = sum(made.begin(), sizes);
      double end = sum(made.end(), sizes);
      double inside = sum(made.inside(), sizes);
      int[] copied = rows == null || rows[sequence].length > columns ? new int[0] : rows[sequence];
      for (int column = 0; column < columns; column++) {
        boolean in = begin <= column && column < end;
        double value = in ? inside + made.step() * column : made.outside();
        value = column < copied.length ? copied[column] : value;
        write(data, type, row * columns + column, value);
      }
    }
    return OnnxTensor.createTensor(ENVIRONMENT, data, shape, type);
  }

  private static double sum(Map<String, Double> terms, Map<String, Long> sizes) {
    double sum = 0;
    for (Map.Entry<String, Double> term : terms.entrySet()) {
      sum += sizes.get(term.getKey()) * term.getValue();
    }
    return sum;
  }

  private static ByteBuffer buffer(int bytes) {
    return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
  }

  private static void write(ByteBuffer data, OnnxJavaType type, int index, double value) {
    int at = index * type.size;
    switch (type) {
      case FLOAT -> data.putFloat(at, (float) value);
      case DOUBLE -> data.putDouble(at, value);
      case INT64 -> data.putLong(at, (long) value);
      case INT32 -> data.putInt(at, (int) value);
      case FLOAT16 -> data.putShort(at, Fp16Conversions.floatToFp16((float) value));
      case BFLOAT16 -> data.putShort(at, Fp16Conversions.floatToBf16((float) value));
      default -> data.put(at, (byte) value);
    }
  }

  /** An element of a tensor, whose bytes these are. */
  static double read(ByteBuffer data, OnnxJavaType type, int index) {
    int at = index * type.size;
    return switch (type) {
      case FLOAT -> data.getFloat(at);
      case DOUBLE -> data.getDouble(at);
      case INT64 -> data.getLong(at);
      case INT32 -> data.getInt(at);
      case FLOAT16 -> Fp16Conversions.fp16ToFloat(data.getShort(at));
      case BFLOAT16 -> Fp16Conversions.bf16ToFloat(data.getShort(at));
      case UINT8 -> Byte.toUnsignedInt(data.get(at));
      default -> data.get(at);
    };
  }

  /** The number of elements of a shape; a Java buffer has at most 2^31 - 1 bytes. */
  static int count(long... shape) {
    return Math.toIntExact(LongStream.of(shape).reduce(1, Math::multiplyExact));
  }

  /** A copy of the bytes of a tensor. */
  static ByteBuffer bytes(OnnxTensor tensor) {
    return tensor.getByteBuffer().order(ByteOrder.nativeOrder());
  }

  /** A range of a tensor along an axis, as bytes: the element type does not matter. */
  record Part(ByteBuffer bytes, int all, int from, int to) {
    /** All of a tensor, of which the binding makes a copy. */
    static Part of(OnnxTensor tensor, int axis) {
      return of(tensor, axis, Tensors.bytes(tensor));
    }

    /** All of a tensor that this class made, where it is. */
    static Part ofMade(OnnxTensor tensor, int axis) {
      return of(tensor, axis, (ByteBuffer) tensor.getBufferRef().orElseThrow());
    }

    private static Part of(OnnxTensor tensor, int axis, ByteBuffer bytes) {
      int all = (int) tensor.getInfo().getShape()[axis];
      return new Part(bytes, all, 0, all);
    }

    Part range(int first, int end) {
      String other = "entries " + first + " to " + end + " of " + all;
      Contract.require(0 <= first && first <= end && end <= all, other);
      return new Part(bytes, all, first, end);
    }

    int count() {
      return to - from;
    }
  }

  /** A tensor like another, of these parts along an axis. */
  static OnnxTensor join(OnnxTensor like, int axis, List<Part> parts) throws OrtException {
    OnnxJavaType type = like.getInfo().type;
    long[] shape = like.getInfo().getShape();
    shape[axis] = parts.stream().mapToInt(Part::count).sum();
    ByteBuffer joined = buffer(count(shape) * type.size);
    int start = 0;
    for (Part part : parts) {
      copy(part, joined, shape, axis, start, type.size);
      start += part.count();
    }
    return OnnxTensor.createTensor(ENVIRONMENT, joined, shape, type);
  }

  /** Writes the entries of a tensor into another, which this class has made, from a place on. */
  static void overwrite(OnnxTensor into, OnnxTensor from, int axis, int start) {
    Part source = Part.of(from, axis);
    Part target = Part.ofMade(into, axis).range(start, start + source.count());
    int width = into.getInfo().type.size;
    copy(source, target.bytes(), into.getInfo().getShape(), axis, start, width);
  }

  private static void copy(
      Part part, ByteBuffer target, long[] shape, int axis, int start, int width) {
    int blocks = count(Arrays.copyOf(shape, axis));
    int row = count(Arrays.copyOfRange(shape, axis + 1, shape.length)) * width;
    for (int block = 0; block < blocks; block++) {
      int at = (block * (int) shape[axis] + start) * row;
      int from = (block * part.all() + part.from()) * row;
      target.put(at, part.bytes(), from, part.count() * row);
    }
  }
}
