package decodeloop;

import ai.onnxruntime.OrtException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import java.util.function.Consumer;

/**
 * Decodes the runs of a probe file, compares the tokens with the expected ones, and writes down all
 * calls.
 *
 * <p>In an app, the lines of the file and the model come from wherever the app has them:
 *
 * <pre>{@code
 * List<String> results = new ArrayList<>();
 * try (Decoder decoder = Decoder.open(Path.of("path/to/the/model"))) {
 *   new Probe(decoder, results::add, System.out::println).run(lines);
 * }
 * }</pre>
 */
public final class Probe {
  private static final Set<String> OPTIONS = Set.of("--run", "--expect");

  private final Decoder decoder;
  private final Consumer<String> results;
  private final Consumer<String> reports;

  /**
   * Takes what all runs use.
   *
   * @param decoder stays open
   * @param results takes each line of the result file, without its end
   * @param reports takes a line for each run, for people
   */
  public Probe(Decoder decoder, Consumer<String> results, Consumer<String> reports) {
    this.decoder = decoder;
    this.results = results;
    this.reports = reports;
  }

  /** Decodes the runs, one a line; returns whether the tokens of all are as expected. */
  public boolean run(List<String> lines) {
    List<Arguments> runs = new ArrayList<>();
    for (int i = 0; i < lines.size(); i++) {
      try {
        if (!lines.get(i).trim().isEmpty()) {
          runs.add(parsed(lines.get(i)));
        }
      } catch (IllegalArgumentException failed) {
        throw new IllegalArgumentException(
            "line " + (i + 1) + " of the probe: " + failed.getMessage(), failed);
      }
    }
    if (runs.isEmpty()) {
      throw new IllegalArgumentException("the probe has no runs");
    }
    boolean right = true;
    for (Arguments run : runs) {
      right &= decode(run);
    }
    return right;
  }

  private static Arguments parsed(String line) {
    Arguments run =
        new Arguments(
            List.of(line.split(" ", -1)),
            name -> OPTIONS.contains(name) || Run.OPTIONS.contains(name));
    run.one("--run");
    return run;
  }

  private boolean decode(Arguments given) {
    String name = given.one("--run");
    List<List<Integer>> tokens = List.of();
    String error = null;
    String difference = null;
    decoder.trace(name, results);
    try {
      decoder.reset();
      Run run = new Run(given);
      int[][] expected = expected(given, run.followed());
      tokens = run.follow(decoder, () -> {});
      difference = difference(tokens, expected);
    } catch (OrtException | RuntimeException failed) {
      error = Objects.requireNonNullElse(failed.getMessage(), failed.toString());
      difference = "error: " + error.replaceAll("\\s+", " ");
    } finally {
      decoder.trace(null, null);
    }
    results.accept(
        String.format(
            "{\"run\": %s, \"tokens\": %s, \"error\": %s}",
            Decoder.quoted(name), tokens, Decoder.quoted(error)));
    reports.accept(name + ": " + Objects.requireNonNullElse(difference, "as expected"));
    return difference == null;
  }

  /** The likeliest token after the prompt and after each given one; -1 where any is right. */
  private static int[][] expected(Arguments given, int[][] followed) {
    int[][] expected = given.rows("--expect");
    int tokens = followed[0].length + 1;
    if (expected.length != followed.length
        || Arrays.stream(expected).anyMatch(row -> row.length != tokens)) {
      throw new IllegalArgumentException(
          "--expect: one id for the prompt and one for each token to follow, for each --prompt");
    }
    return expected;
  }

  /** The first token that is not the expected one, in words; null where there is none. */
  private static String difference(List<List<Integer>> tokens, int[][] expected) {
    for (int row = 0; row < expected.length; row++) {
      for (int step = 0; step < expected[row].length; step++) {
        int token = tokens.get(row).get(step);
        int right = expected[row][step];
        if (right != -1 && token != right) {
          return String.format(
              "sequence %s, step %s: token %s in place of %s", row, step, token, right);
        }
      }
    }
    return null;
  }
}
