package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * The logits of a call: for each sequence a row for each new token, or the last row alone where the
 * graph returns no more. In those of a prefill the padding on the left counts.
 */
public final class Logits {
  private final ByteBuffer data;
  private final OnnxJavaType type;
  private final int sequences;
  private final int rows;
  private final int width;

  /** What a call returned. The binding copies it; a row is copied when it is asked for. */
  Logits(OnnxTensor tensor, int sequences) {
    long[] shape = tensor.getInfo().getShape();
    data = Tensors.bytes(tensor);
    type = tensor.getInfo().type;
    this.sequences = sequences;
    rows = shape.length == 3 && shape[0] == sequences ? (int) shape[1] : 1;
    width = Tensors.count(shape) / sequences / rows;
  }

  /** The number of sequences. */
  public int sequences() {
    return sequences;
  }

  /** The number of rows of each sequence. */
  public int rows() {
    return rows;
  }

  /** A copy of a row of a sequence. */
  public float[] row(int sequence, int row) {
    float[] copy = new float[width];
    int first = (sequence * rows + row) * width;
    for (int i = 0; i < width; i++) {
      copy[i] = (float) Tensors.read(data, type, first + i);
    }
    return copy;
  }

  /** A copy of the row after the last token of a sequence. */
  public float[] last(int sequence) {
    return row(sequence, rows - 1);
  }

  /** The likeliest token after the last one of each sequence, in a list of its own. */
  public List<List<Integer>> likeliest() {
    return IntStream.range(0, sequences).mapToObj(i -> List.of(likeliest(last(i)))).toList();
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

  /** All tokens, the likeliest first. */
  static Stream<Integer> ranked(float[] logits) {
    return IntStream.range(0, logits.length)
        .boxed()
        .sorted((a, b) -> Float.compare(logits[b], logits[a]));
  }
}
