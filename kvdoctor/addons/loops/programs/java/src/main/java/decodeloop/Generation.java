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
 * @param raw whether tokens that the contract suppresses or forces are left to {@code choose}
 */
public record Generation(
    int most, Set<Integer> stop, Choose choose, boolean continues, boolean raw) {

  public Generation {
    if (most < 1) {
      throw new IllegalArgumentException("most is 1 or more");
    }
  }

  /** Takes the likeliest tokens, so many at most, until one of the contract ends the sequence. */
  public static Generation most(int most) {
    return new Generation(most, null, (logits, tokens) -> Logits.likeliest(logits), false, false);
  }

  /** The same with other tokens that end a sequence. */
  public Generation stopAt(Set<Integer> stop) {
    return new Generation(most, stop, choose, continues, raw);
  }

  /** The same with another choice, such as a {@link Sampling}. */
  public Generation choose(Choose choose) {
    return new Generation(most, stop, choose, continues, raw);
  }

  /** The same for prompts that follow the tokens in the cache. */
  public Generation continuing() {
    return new Generation(most, stop, choose, true, raw);
  }

  /** Picks the next token of a sequence. */
  @FunctionalInterface
  public interface Choose {
    /**
     * Picks a token.
     *
     * @param logits a row, which may be changed
     * @param tokens those of the sequence so far
     */
    int next(float[] logits, List<Integer> tokens);
  }
}
