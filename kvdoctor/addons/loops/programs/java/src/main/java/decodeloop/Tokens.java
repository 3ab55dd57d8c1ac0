package decodeloop;

import ai.onnxruntime.OrtException;
import decodeloop.Contract.Ids;
import decodeloop.Decoder.Token;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.Spliterator;
import java.util.Spliterators;
import java.util.function.Consumer;
import java.util.stream.Collectors;

/** The tokens of {@link Decoder#tokens}, one after another. */
final class Tokens extends Spliterators.AbstractSpliterator<Token> {
  private final Decoder decoder;
  private final int[][] prompts;
  private final Generation how;
  private final Ids ids;
  private final Set<Integer> stop;
  private final List<List<Integer>> sequences;
  private final boolean[] ended;
  private int going;
  private Logits logits;
  private int steps;
  private int row;

  Tokens(Decoder decoder, int[][] prompts, Generation how) {
    super(Long.MAX_VALUE, Spliterator.ORDERED | Spliterator.NONNULL);
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
    going = prompts.length;
    row = prompts.length;
  }

  @Override
  public boolean tryAdvance(Consumer<? super Token> action) {
    while (row < prompts.length || step()) {
      int at = row++;
      if (ended[at]) {
        continue;
      }
      int id = pick(logits.last(at), sequences.get(at));
      sequences.get(at).add(id);
      if (!stop.contains(id)) {
        action.accept(new Token(at, id));
        return true;
      }
      ended[at] = true;
      going--;
    }
    return false;
  }

  /** Makes the logits of the next tokens; false after the last ones. */
  private boolean step() {
    try {
      if (steps == 0) {
        logits = how.continues() ? decoder.step(prompts) : decoder.prefill(prompts);
      } else if (going == 0 || steps >= how.most() || decoder.length() >= decoder.limit()) {
        return false;
      } else {
        logits =
            decoder.step(
                sequences.stream()
                    .map(tokens -> new int[] {tokens.get(tokens.size() - 1)})
                    .toArray(int[][]::new));
      }
    } catch (OrtException failed) {
      throw new IllegalStateException(failed.getMessage(), failed);
    }
    steps++;
    row = 0;
    return true;
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
