package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.platform.Fp16Conversions;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.List;
import java.util.function.IntToDoubleFunction;
import java.util.stream.IntStream;
import java.util.stream.LongStream;

/** Tensors from functions and from parts of others, and their elements. */
final class Tensors {
  private static final OrtEnvironment ENVIRONMENT = OrtEnvironment.getEnvironment();

  private Tensors() {}

  /** A tensor whose element i is {@code at(i)}; zeros where that is null. */
  static OnnxTensor fill(String dtype, long[] shape, IntToDoubleFunction at) throws OrtException {
    OnnxJavaType type = Contract.typeOf(dtype);
    int size = count(shape);
    ByteBuffer data = buffer(size * type.size);
    for (int i = 0; at != null && i < size; i++) {
      write(data, type, i * type.size, at.applyAsDouble(i));
    }
    return OnnxTensor.createTensor(ENVIRONMENT, data, shape, type);
  }

  private static ByteBuffer buffer(int bytes) {
    return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
  }

  private static void write(ByteBuffer data, OnnxJavaType type, int at, double value) {
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
      if (first < 0 || first > end || end > all) {
        throw new IllegalArgumentException("entries " + first + " to " + end + " of " + all);
      }
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
    int blocks = count(Arrays.copyOf(shape, axis));
    int row = count(Arrays.copyOfRange(shape, axis + 1, shape.length)) * type.size;
    shape[axis] = parts.stream().mapToInt(Part::count).sum();
    ByteBuffer joined = buffer(count(shape) * type.size);
    for (int block = 0; block < blocks; block++) {
      for (Part part : parts) {
        int from = (block * part.all() + part.from()) * row;
        joined.put(joined.position(), part.bytes(), from, part.count() * row);
        joined.position(joined.position() + part.count() * row);
      }
    }
    return OnnxTensor.createTensor(ENVIRONMENT, joined.rewind(), shape, type);
  }

  /** Writes the entries of a tensor into another, which this program made, from a place on. */
  static void overwrite(OnnxTensor into, OnnxTensor from, int axis, int start) {
    long[] shape = into.getInfo().getShape();
    int blocks = count(Arrays.copyOf(shape, axis));
    int row = count(Arrays.copyOfRange(shape, axis + 1, shape.length)) * into.getInfo().type.size;
    Part source = Part.of(from, axis);
    Part target = Part.ofMade(into, axis).range(start, start + source.count());
    for (int block = 0; block < blocks; block++) {
      int at = (block * target.all() + start) * row;
      int size = source.count() * row;
      target.bytes().put(at, source.bytes(), block * size, size);
    }
  }

  /** A tensor of chosen entries along an axis, each of so many rows. */
  static OnnxTensor choose(OnnxTensor tensor, int axis, int[] entries, int rows)
      throws OrtException {
    Part all = Part.of(tensor, axis);
    return join(
        tensor,
        axis,
        IntStream.of(entries).mapToObj(i -> all.range(i * rows, (i + 1) * rows)).toList());
  }
}
