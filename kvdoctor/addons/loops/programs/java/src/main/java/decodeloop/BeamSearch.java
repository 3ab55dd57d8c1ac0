package decodeloop;

import ai.onnxruntime.OrtException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.List;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/** An example over the library, for a model whose contract has {@code reorders}. */
public final class BeamSearch {
  /** A sequence of a search: its log probability, and the row that it continues. */
  private record Beam(double score, int row, List<Integer> tokens) {
    int last() {
      return tokens.get(tokens.size() - 1);
    }

    double mean() {
      return score / tokens.size();
    }

    /** The likeliest continuations by one token. */
    Stream<Beam> next(int row, float[] logits, int count) {
      double sum = IntStream.range(0, logits.length).mapToDouble(i -> Math.exp(logits[i])).sum();
      return Logits.ranked(logits)
          .limit(count)
          .map(
              token -> {
                List<Integer> longer = new ArrayList<>(tokens);
                longer.add(token);
                return new Beam(score + logits[token] - Math.log(sum), row, longer);
              });
    }
  }

  private BeamSearch() {}

  /**
   * The tokens with the best mean log probability that so many beams find, with the token that
   * ended them. It ends when as many have ended. An encoder reads the source once for each beam.
   */
  public static List<Integer> search(Decoder decoder, int[] prompt, int beams, int most)
      throws OrtException {
    List<Integer> ends = decoder.contract().generation().end();
    int width = beams * (1 + ends.size()); // so many have as many as there are beams that go on
    Logits logits = decoder.prefill(Collections.nCopies(beams, prompt).toArray(int[][]::new));
    List<Beam> going = List.of(new Beam(0, 0, List.of())); // all begin with the same prompt
    List<Beam> ended = new ArrayList<>();
    for (int count = 1; ; count++) {
      List<Beam> found = new ArrayList<>();
      for (int row = 0; row < going.size(); row++) {
        going.get(row).next(row, logits.last(row), width).forEach(found::add);
      }
      found.sort(Comparator.comparingDouble(Beam::score).reversed());
      found.stream().limit(beams).filter(one -> ends.contains(one.last())).forEach(ended::add);
      going = found.stream().filter(one -> !ends.contains(one.last())).limit(beams).toList();
      if (ended.size() >= beams || count == most || decoder.length() >= decoder.limit()) {
        ended.addAll(going);
        return Collections.max(ended, Comparator.comparingDouble(Beam::mean)).tokens();
      }
      decoder.reorder(going.stream().mapToInt(Beam::row).toArray());
      logits =
          decoder.step(going.stream().map(one -> new int[] {one.last()}).toArray(int[][]::new));
    }
  }
}
