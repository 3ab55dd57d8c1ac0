package decodeloop;

import ai.onnxruntime.OrtException;
import decodeloop.Contract.Ids;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Set;
import java.util.stream.IntStream;

/** The tokens of {@link Decoder#tokens}, one after another. */
final class TokenIterator implements Iterator<Token> {
  private final Decoder decoder;
  private final int[][] prompts;
  private final Generation how;
  private final Set<Integer> stop;
  private final int[][] chosen;
  private final boolean[] ended;
  private Logits logits;
  private List<List<Integer>> tokens = List.of();
  private int steps;
  private int row;
  private Token next;

  TokenIterator(Decoder decoder, int[][] prompts, Generation how) {
    this.decoder = decoder;
    this.prompts = prompts;
    this.how = how;
    Ids ids = decoder.contract().generation();
    stop = how.stop() != null ? how.stop() : ids == null ? Set.of() : Set.copyOf(ids.end());
    chosen = new int[prompts.length][1];
    ended = new boolean[prompts.length];
    row = prompts.length;
  }

  /** The next token, or null after the last one. */
  Token advance() throws OrtException {
    while (true) {
      if (row == prompts.length && !step()) {
        return null;
      }
      int at = row++;
      int id = pick(logits.last(at), tokens.get(at));
      chosen[at][0] = id;
      ended[at] |= stop.contains(id);
      if (!ended[at]) {
        return new Token(at, id);
      }
    }
  }

  /** Makes the logits of the next tokens; false after the last ones. */
  private boolean step() throws OrtException {
    if (steps == 0) {
      boolean follows = how.continues() && decoder.length() > 0;
      logits = follows ? decoder.step(prompts) : decoder.prefill(prompts);
    } else {
      boolean going = IntStream.range(0, ended.length).anyMatch(i -> !ended[i]);
      if (!going || steps >= how.most() || decoder.length() >= decoder.limit()) {
        return false;
      }
      logits = decoder.step(chosen);
    }
    tokens = decoder.history();
    steps++;
    row = 0;
    return true;
  }

  /** Chooses a token, from those that the contract leaves. */
  private int pick(float[] logits, List<Integer> tokens) {
    Ids ids = decoder.contract().generation();
    if (!how.raw() && ids != null) {
      for (int[] forced : ids.forced()) {
        if (forced[0] == tokens.size()) {
          return forced[1];
        }
      }
      suppress(logits, ids.suppress());
      if (steps == 1) {
        suppress(logits, ids.beginSuppress());
      }
    }
    return how.choose().next(logits, tokens);
  }

  private static void suppress(float[] logits, List<Integer> ids) {
    ids.stream().filter(id -> id < logits.length).forEach(id -> logits[id] = -1 / 0f);
  }

  @Override
  public boolean hasNext() {
    if (next == null) {
      try {
        next = advance();
      } catch (OrtException failed) {
        throw new IllegalStateException(failed.getMessage(), failed);
      }
    }
    return next != null;
  }

  @Override
  public Token next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    Token token = next;
    next = null;
    return token;
  }
}
