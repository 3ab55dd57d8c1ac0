package decodeloop;

import com.google.gson.JsonPrimitive;
import decodeloop.Contract.Input;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.IntToDoubleFunction;

/**
 * The values of the inputs in one call, by the rules of the contract.
 *
 * @param sizes of all axes and numbers, by what they count
 * @param tokens the new ones
 * @param padding of each sequence, on the left
 * @param mask of the source, or null
 */
record Inputs(Map<String, Long> sizes, int[][] tokens, int[] padding, int[][] mask) {
  /** Rules of values that a graph or the caller made. */
  static final Set<String> GIVEN = Set.of("embeddings", "encoder-input", "encoder-states");

  static final Set<String> RULES =
      Set.of(
          "embeddings",
          "encoder-input",
          "encoder-states",
          "encoder-mask",
          "tokens",
          "token-and-position",
          "positions",
          "rows",
          "number",
          "attention-mask",
          "padding-mask",
          "window-mask",
          "causal-mask");

  /** A shape with the sizes that are known; an axis of another name has one entry. */
  static long[] resolve(List<JsonPrimitive> dims, Map<String, Long> sizes) {
    return dims.stream()
        .mapToLong(d -> d.isNumber() ? d.getAsLong() : sizes.getOrDefault(d.getAsString(), 1L))
        .toArray();
  }

  /** Element i of an input as a function of i. */
  IntToDoubleFunction element(Input one, long[] shape) {
    int columns = shape.length == 0 ? 1 : (int) Math.max(shape[shape.length - 1], 1);
    int count = tokens[0].length;
    return switch (one.rule()) {
      case "tokens" -> i -> tokens[i / count][i % count];
      case "token-and-position" -> i -> i % 2 == 0 ? tokens[i / 2][0] : size("past");
      case "rows" -> i -> sequence(one, shape, i);
      case "positions" -> {
        int past = size("past");
        yield i -> Math.max(past + i % count - padded(one, shape, i), 0);
      }
      case "encoder-mask" -> {
        // One of another length belongs to the encoder's input alone.
        boolean fits =
            mask != null && Arrays.equals(shape, new long[] {mask.length, mask[0].length});
        yield fits ? i -> mask[i / columns][i % columns] : i -> 1;
      }
      case "number" -> {
        double number = one.count().equals("constant") ? one.value() : size(one.count());
        yield i -> number;
      }
      default -> mask(one, shape, columns);
    };
  }

  /** Shows the tokens; in a mask with rows each sees itself and what is before it. */
  private IntToDoubleFunction mask(Input one, long[] shape, int columns) {
    int total = size("total");
    int first = one.fromRight() ? columns - total : 0; // the column of the first token
    if (one.rowsFrom() == null) {
      return i -> {
        int column = i % columns - first;
        boolean seen = padded(one, shape, i) <= column && column < total;
        return seen ? one.shown() : one.hidden();
      };
    }
    int rows = (int) shape[shape.length - 2];
    int before = one.rowsFrom().equals("constant") ? 0 : size(one.rowsFrom());
    return i -> {
      int column = i % columns - first;
      return 0 <= column && column <= before + i / columns % rows ? one.shown() : one.hidden();
    };
  }

  /** The sequence that an element belongs to. */
  private int sequence(Input one, long[] shape, int i) {
    int axis = one.batchAxis() == null ? shape.length - 1 : one.batchAxis();
    int each = 1; // elements from one sequence to the next
    for (int inner = axis + 1; inner < shape.length; inner++) {
      each *= (int) shape[inner];
    }
    return i / each % tokens.length;
  }

  private int padded(Input one, long[] shape, int i) {
    return one.batchAxis() == null ? 0 : padding[sequence(one, shape, i)];
  }

  private int size(String name) {
    return Math.toIntExact(sizes.get(name));
  }
}
