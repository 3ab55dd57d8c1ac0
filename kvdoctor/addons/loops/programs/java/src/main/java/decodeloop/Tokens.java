package decodeloop;

import ai.onnxruntime.OrtException;
import decodeloop.Contract.Ids;
import decodeloop.Decoder.Token;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.stream.Collectors;

/** Makes the tokens of {@link Decoder#tokens}, step by step. */
final class Tokens {
  private final Decoder decoder;
  private final int[][] prompts;
  private final Generation how;
  private final Ids ids;
  private final Set<Integer> stop;
  private final List<List<Integer>> sequences;
  private final boolean[] ended;
  private int steps;

  Tokens(Decoder decoder, int[][] prompts, Generation how) {
    this.decoder = decoder;
    this.prompts = prompts;
    this.how = how;
    ids = decoder.contract().generation();
    stop = how.stop() == null ? Set.copyOf(ids.end()) : how.stop();
    sequences =
        Arrays.stream(prompts)
            .map(one -> Arrays.stream(one).boxed().collect(Collectors.toList()))
            .toList();
    ended = new boolean[prompts.length];
  }

  /** A token of each sequence that goes on; none after the last ones. */
  List<Token> next() {
    List<Token> made = new ArrayList<>();
    if (steps > 0 && (steps >= how.most() || decoder.length() >= decoder.limit())) {
      return made;
    }
    Logits logits;
    try {
      logits = steps > 0 || how.continues() ? decoder.step(fed()) : decoder.prefill(prompts);
    } catch (OrtException failed) {
      throw new IllegalStateException(failed.getMessage(), failed);
    }
    steps++;
    for (int row = 0; row < ended.length; row++) {
      if (!ended[row]) {
        int id = pick(logits.last(row), sequences.get(row));
        sequences.get(row).add(id);
        ended[row] = stop.contains(id);
        made.addAll(ended[row] ? List.of() : List.of(new Token(row, id)));
      }
    }
    return made;
  }

  /** What the sequences go on with. */
  private int[][] fed() {
    return steps == 0
        ? prompts
        : sequences.stream()
            .map(tokens -> new int[] {tokens.get(tokens.size() - 1)})
            .toArray(int[][]::new);
  }

  /** Chooses a token, from those that the contract leaves. */
  private int pick(float[] row, List<Integer> tokens) {
    for (int[] forced : ids.forced()) {
      if (forced[0] == tokens.size()) {
        return forced[1];
      }
    }
    List<Integer> left = new ArrayList<>(ids.suppress());
    left.addAll(steps == 1 ? ids.beginSuppress() : List.of());
    left.stream().filter(id -> id < row.length).forEach(id -> row[id] = Float.NEGATIVE_INFINITY);
    return how.choose().next(row, tokens);
  }
}
