package decodeloop;

import java.util.List;
import java.util.Set;

/**
 * How tokens are generated.
 *
 * @param most the most new tokens of a sequence
 * @param stop tokens that end a sequence; null are those of the contract
 * @param choose picks the next token of a sequence
 * @param continues whether the prompts follow the tokens in the cache, in place of beginning anew
 */
public record Generation(int most, Set<Integer> stop, Choose choose, boolean continues) {

  public Generation {
    if (most < 1) {
      throw new IllegalArgumentException("most is 1 or more");
    }
  }

  /** Takes the likeliest tokens, so many at most, until one of the contract ends the sequence. */
  public static Generation most(int most) {
    return new Generation(most, null, (logits, tokens) -> Logits.likeliest(logits), false);
  }

  /** The same with other tokens that end a sequence. */
  public Generation stopAt(Set<Integer> stop) {
    return new Generation(most, stop, choose, continues);
  }

  /** The same with another choice, such as a {@link Sampling}. */
  public Generation choose(Choose choose) {
    return new Generation(most, stop, choose, continues);
  }

  /** The same for prompts that follow the tokens in the cache. */
  public Generation continuing() {
    return new Generation(most, stop, choose, true);
  }

  /** Picks the next token of a sequence, from a row that it may change and the tokens so far. */
  @FunctionalInterface
  public interface Choose {
    int next(float[] logits, List<Integer> tokens);
  }
}
