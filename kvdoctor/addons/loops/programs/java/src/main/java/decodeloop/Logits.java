package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.List;

/**
 * The logits of a call: for each sequence a row for each new token, or the last row alone where the
 * graph returns no more. In those of a prefill the padding on the left counts.
 */
public final class Logits {
  private final List<FloatBuffer> parts = new ArrayList<>();
  private final int sequences;
  private final int rows; // of a part
  private final int width;

  /**
   * The logits that a call returned. The binding copies them; a row is copied when it is asked for.
   */
  Logits(OnnxTensor tensor, int sequences, Integer vocabulary) {
    long[] shape = tensor.getInfo().getShape();
    int each = Tensors.count(shape) / sequences;
    boolean known = vocabulary != null && each % vocabulary == 0;
    this.sequences = sequences;
    width = known ? vocabulary : shape.length == 3 ? (int) shape[2] : each;
    rows = each / width;
    boolean isDouble = tensor.getInfo().type == OnnxJavaType.DOUBLE;
    parts.add(isDouble ? narrowed(tensor.getDoubleBuffer()) : tensor.getFloatBuffer());
  }

  private static FloatBuffer narrowed(DoubleBuffer values) {
    FloatBuffer floats = FloatBuffer.allocate(values.remaining());
    while (values.hasRemaining()) {
      floats.put((float) values.get());
    }
    return floats.rewind();
  }

  /** Adds the rows of the call after this one. */
  void add(Logits more) {
    parts.addAll(more.parts);
  }

  /** The number of sequences. */
  public int sequences() {
    return sequences;
  }

  /** The number of rows of each sequence. */
  public int rows() {
    return rows * parts.size();
  }

  /** A copy of a row of a sequence. */
  public float[] row(int sequence, int row) {
    float[] copy = new float[width];
    int at = sequence * rows + row % rows;
    parts.get(row / rows).get(at * width, copy);
    return copy;
  }

  /** A copy of the row after the last token of a sequence. */
  public float[] last(int sequence) {
    return row(sequence, rows() - 1);
  }

  /** The token with the highest of some logits, the first of several. */
  public static int likeliest(float[] logits) {
    int best = 0;
    for (int token = 1; token < logits.length; token++) {
      if (logits[token] > logits[best]) {
        best = token;
      }
    }
    return best;
  }
}
