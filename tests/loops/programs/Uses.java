import decodeloop.BeamSearch;
import decodeloop.Contract;
import decodeloop.Decoder;
import decodeloop.Decoder.Token;
import decodeloop.Generation;
import decodeloop.Logits;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CancellationException;

/**
 * Two models in one process, and what the library refuses. Arguments: the folder of a model and its
 * contract, of llama-gqa and of marian-4.46.3.
 */
public final class Uses {
  private static final int[][] PROMPT = {{5, 6, 7}};
  private static final int[][] SOURCE = {{5, 6, 7}, {8, 9, 10}};
  private static final int[][] TWO = {{1}, {2}};
  private static final Generation SIX = Generation.most(6).stopAt(Set.of());

  public static void main(String[] args) throws Exception {
    try (Decoder llama = open(args, 0);
        Decoder other = open(args, 0);
        Decoder marian = open(args, 2)) {
      List<Integer> whole = llama.generate(PROMPT, SIX).get(0);
      takeTurns(llama, other, marian, whole);
      continues(llama, other, whole);
      leavesWhatFails(llama, whole);
      readsSources(marian);
    }
  }

  private static Decoder open(String[] args, int at) throws Exception {
    return Decoder.open(Path.of(args[at]), Contract.read(Path.of(args[at + 1])));
  }

  private static void takeTurns(Decoder llama, Decoder other, Decoder marian, List<Integer> whole)
      throws Exception {
    marian.encode(SOURCE);
    List<List<Integer>> alone = marian.generate(TWO, SIX);
    other.prefill(new int[][] {{9, 8}});
    Logits logits = marian.prefill(TWO);
    Iterator<Token> tokens = llama.tokens(PROMPT, SIX).iterator();
    for (int at = 0; at < 6; at++) {
      same(tokens.next(), new Token(0, whole.get(at)));
      int[][] chosen = {{Logits.likeliest(logits.last(0))}, {Logits.likeliest(logits.last(1))}};
      same(chosen[0][0], alone.get(0).get(at));
      same(chosen[1][0], alone.get(1).get(at));
      logits = marian.step(chosen);
      other.step(new int[][] {{3}});
    }
    same(tokens.hasNext(), false);
  }

  /** A second turn, and the logits of all new tokens. */
  private static void continues(Decoder llama, Decoder other, List<Integer> whole)
      throws Exception {
    List<Integer> text = new ArrayList<>(List.of(5, 6, 7));
    text.addAll(whole);
    text.addAll(List.of(8, 9));
    llama.generate(PROMPT, SIX);
    List<Integer> turn = text.subList(llama.length(), text.size());
    same(llama.generate(ids(turn), SIX.continuing()), other.generate(ids(text), SIX));
    same(Logits.likeliest(other.prefill(ids(text)).row(0, 2)), whole.get(0));
    // A search with beams finds no worse tokens than the likeliest ones, and one beam finds these.
    same(BeamSearch.search(other, PROMPT[0], 1, 6), whole);
    List<Integer> found = BeamSearch.search(other, PROMPT[0], 4, 6);
    same(score(other, found) >= score(other, whole), true);
  }

  /** The log probability of tokens after the prompt. */
  private static double score(Decoder decoder, List<Integer> tokens) throws Exception {
    List<Integer> text = new ArrayList<>(List.of(5, 6, 7));
    text.addAll(tokens);
    Logits logits = decoder.prefill(ids(text));
    double all = 0;
    for (int i = 0; i < tokens.size(); i++) {
      double sum = 0;
      for (float logit : logits.row(0, 2 + i)) {
        sum += Math.exp(logit);
      }
      all += logits.row(0, 2 + i)[tokens.get(i)] - Math.log(sum);
    }
    return all;
  }

  private static int[][] ids(List<Integer> row) {
    return new int[][] {row.stream().mapToInt(Integer::intValue).toArray()};
  }

  private static void leavesWhatFails(Decoder llama, List<Integer> whole) throws Exception {
    int[][] next = {{whole.get(0)}};
    llama.prefill(PROMPT);
    for (int[][] wrong : new int[][][] {{{128}}, {{-1}}, {{1}, {2}}, {{}}, {}, {new int[100]}}) {
      refused(() -> llama.step(wrong));
    }
    refused(() -> llama.rewind(3));
    refused(() -> llama.prefill(new int[][] {{1}, {}}));
    Thread.currentThread().interrupt();
    cancelled(() -> llama.step(next));
    same(Thread.interrupted(), true);
    llama.cancel();
    cancelled(() -> llama.step(next));
    same(Logits.likeliest(llama.step(next).last(0)), whole.get(1));
    Generation.Choose failing =
        (logits, tokens) -> {
          throw new IllegalStateException("no choice after " + tokens);
        };
    refused(() -> llama.generate(PROMPT, SIX.choose(failing)));
    same(Logits.likeliest(llama.step(next).last(0)), whole.get(1));
  }

  private static void readsSources(Decoder marian) throws Exception {
    marian.reset();
    refused(() -> marian.prefill(TWO));
    refused(() -> marian.encode(new int[][] {{5, -1}}));
    refused(() -> marian.encode(new float[6], new long[] {2, 3}, new int[][] {{1, 1}}));
    marian.encode(SOURCE);
    refused(() -> marian.prefill(PROMPT));
    List<List<Integer>> alone = marian.generate(TWO, SIX);
    marian.reorder(new int[] {1, 0});
    same(marian.generate(TWO, SIX), alone);
  }

  private interface Use {
    void run() throws Exception;
  }

  private static void refused(Use use) throws Exception {
    try {
      use.run();
    } catch (IllegalArgumentException | IllegalStateException failed) {
      System.out.println(failed.getMessage());
      return;
    }
    throw new AssertionError("it was not refused");
  }

  private static void cancelled(Use use) throws Exception {
    try {
      use.run();
    } catch (CancellationException failed) {
      return;
    }
    throw new AssertionError("it was not cancelled");
  }

  private static void same(Object got, Object wanted) {
    if (!got.equals(wanted)) {
      throw new AssertionError(got + " in place of " + wanted);
    }
  }
}
