package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.platform.Fp16Conversions;
import com.google.gson.JsonArray;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.function.IntToDoubleFunction;
import java.util.stream.IntStream;
import java.util.stream.LongStream;

/** Tensors from functions and from parts of others, and their elements. */
final class Tensors {
  /** The largest size of a tensor of which a trace has all elements; of others it has so many. */
  private static final int MOST_ELEMENTS = 64;

  private static final OrtEnvironment ENVIRONMENT = OrtEnvironment.getEnvironment();

  private Tensors() {}

  /** A tensor whose element i is {@code at(i)}; zeros where that is null. */
  static OnnxTensor fill(String dtype, long[] shape, IntToDoubleFunction at) throws OrtException {
    OnnxJavaType type = Contract.typeOf(dtype).orElseThrow();
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

  static double read(ByteBuffer data, OnnxJavaType type, int at) {
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

  /**
   * The bytes of a tensor that this class made, where they are; of others the binding copies them.
   */
  private static ByteBuffer made(OnnxTensor tensor) {
    ByteBuffer bytes = (ByteBuffer) tensor.getBufferRef().orElseThrow();
    return bytes.order(ByteOrder.nativeOrder());
  }

  /** A range of a tensor along an axis, as bytes: the element type does not matter. */
  record Part(ByteBuffer bytes, int all, int from, int to) {
    /** All of a tensor that may come from the runtime. */
    static Part of(OnnxTensor tensor, int axis) {
      return of(tensor, axis, tensor.getByteBuffer());
    }

    /** All of a tensor that this class made. */
    static Part ofMade(OnnxTensor tensor, int axis) {
      return of(tensor, axis, made(tensor));
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

  /** Writes the entries of a tensor into another, which the program made, from {@code start} on. */
  static void overwrite(OnnxTensor into, OnnxTensor from, int axis, int start) {
    long[] shape = into.getInfo().getShape();
    int blocks = count(Arrays.copyOf(shape, axis));
    int row = count(Arrays.copyOfRange(shape, axis + 1, shape.length)) * into.getInfo().type.size;
    Part target = Part.ofMade(into, axis);
    Part source = Part.of(from, axis);
    target.range(start, start + source.count());
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

  /** Tensors as a trace has them. */
  static JsonObject described(Map<String, OnnxTensor> tensors) {
    JsonObject all = new JsonObject();
    tensors.forEach(
        (name, tensor) -> {
          JsonObject one = new JsonObject();
          OnnxJavaType type = tensor.getInfo().type;
          one.addProperty("dtype", type.name().toLowerCase(java.util.Locale.ROOT));
          JsonArray shape = new JsonArray();
          LongStream.of(tensor.getInfo().getShape()).forEach(shape::add);
          one.add("shape", shape);
          long size = tensor.getInfo().getNumElements();
          JsonArray numbers = new JsonArray();
          ByteBuffer data = size == 0 ? null : tensor.getByteBuffer();
          LongStream.range(0, Math.min(size, MOST_ELEMENTS))
              .map(k -> size <= MOST_ELEMENTS ? k : k * (size - 1) / (MOST_ELEMENTS - 1))
              .forEach(i -> numbers.add(json(read(data, type, (int) i * type.size))));
          one.add(size <= MOST_ELEMENTS ? "data" : "sample", numbers);
          all.add(name, one);
        });
    return all;
  }

  /** JSON has no NaN and no infinity. */
  private static JsonPrimitive json(double number) {
    if (!Double.isFinite(number)) {
      return null;
    }
    return number == Math.rint(number) && Math.abs(number) < 1e15
        ? new JsonPrimitive((long) number)
        : new JsonPrimitive(number);
  }

  static String quoted(String text) {
    return new JsonPrimitive(text).toString();
  }
}
