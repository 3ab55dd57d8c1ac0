package decodeloop;

import decodeloop.Contract.Dim;
import decodeloop.Contract.Input;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.IntToDoubleFunction;

/**
 * The values of the inputs in one call, by the rules of the contract.
 *
 * @param sizes of all axes, by their names
 * @param tokens the new ones
 * @param padding of each sequence, on the left
 * @param mask of the source, or null
 */
record Inputs(Map<String, Long> sizes, int[][] tokens, int[] padding, int[][] mask) {
  static final Set<String> RULES =
      Set.of(
          "tokens",
          "embeddings",
          "attention-mask",
          "causal-mask",
          "positions",
          "number",
          "encoder-input",
          "encoder-mask",
          "encoder-states",
          "padding-mask",
          "window-mask",
          "rows",
          "token-and-position");
  static final Set<String> COUNTS =
      Set.of(
          "constant",
          "past",
          "total",
          "last",
          "new",
          "cached",
          "batch",
          "last-new",
          "first",
          "encoder_input");

  /** The shape of an input. */
  long[] shape(Input one) {
    if (one.rule().equals("tokens")) {
      long batch = tokens.length;
      long count = tokens[0].length;
      return one.dims().size() == 1 ? new long[] {batch * count} : new long[] {batch, count};
    }
    return resolve(one.dims(), sizes);
  }

  /** A shape with the sizes that are known now; an axis of another name has one entry. */
  static long[] resolve(List<Dim> dims, Map<String, Long> sizes) {
    long[] shape = new long[dims.size()];
    for (int i = 0; i < shape.length; i++) {
      Dim dim = dims.get(i);
      shape[i] = dim.axis() == null ? dim.size() : sizes.getOrDefault(dim.axis(), 1L);
    }
    return shape;
  }

  /** Element i of an input as a function of i. */
  IntToDoubleFunction element(Input one, long[] shape) {
    int columns = shape.length == 0 ? 1 : (int) Math.max(shape[shape.length - 1], 1);
    // Elements of one sequence.
    int each =
        shape.length < 2
            ? columns
            : Math.max(Tensors.count(shape) / Math.max((int) shape[0], 1), 1);
    int past = size("past");
    int count = size("new");
    int total = size("total");
    return switch (one.rule()) {
      case "tokens" -> i -> tokens[i / count][i % count];
      case "token-and-position" -> i -> i % 2 == 1 ? past : tokens[i / 2][0];
      case "rows" -> shape.length < 2 ? i -> i : i -> i / each;
      case "attention-mask" -> i -> isToken(i % columns, total, padding[i / each]) ? 1 : 0;
      case "padding-mask" -> i -> isToken(i % columns, total, padding[i / each]) ? 0 : 1;
      case "window-mask" -> // the last token is in the last column
          i -> isToken(i % columns - columns + total, total, padding[i / each]) ? 1 : 0;
      case "causal-mask" -> causal(one, shape, columns);
      case "positions" ->
          shape.length < 2
              ? i -> past + i % count
              : i -> Math.max(past + i % count - padding[i / count % padding.length], 0);
      case "encoder-mask" -> {
        // One of another length belongs to the encoder's input alone.
        boolean fits =
            mask != null && Arrays.equals(shape, new long[] {mask.length, mask[0].length});
        yield fits ? i -> mask[i / columns][i % columns] : i -> 1;
      }
      default -> {
        double number = number(one);
        yield i -> number;
      }
    };
  }

  private static boolean isToken(int column, int total, int padded) {
    return padded <= column && column < total;
  }

  /** Shows a query its own position and those before it. The rows are queries. */
  private IntToDoubleFunction causal(Input one, long[] shape, int columns) {
    int rows = (int) shape[shape.length - 2];
    int first = "total".equals(one.dims().get(shape.length - 2).axis()) ? 0 : size("past");
    // From the right, the newest entry is in the last column.
    int oldest = one.fromRight() ? columns - size("total") : 0;
    return i -> {
      int column = i % columns - oldest;
      return 0 <= column && column <= first + i / columns % rows ? one.shown() : one.hidden();
    };
  }

  private double number(Input one) {
    return switch (one.count()) {
      case "constant" -> one.value();
      case "last" -> size("total") - 1;
      case "last-new" -> size("new") - 1;
      case "cached" -> size("past") > 0 ? 1 : 0;
      case "first" -> size("past") > 0 ? 0 : 1;
      default -> size(one.count());
    };
  }

  private int size(String name) {
    return Math.toIntExact(sizes.getOrDefault(name, 1L));
  }
}
