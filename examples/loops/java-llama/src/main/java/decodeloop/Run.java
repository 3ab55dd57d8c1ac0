package decodeloop;

import ai.onnxruntime.OrtException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.stream.IntStream;

/** One run by its arguments: the prompts, and tokens that are given to follow them. */
final class Run {
  static final Set<String> OPTIONS = Set.of("--prompt", "--follow", "--self-test");

  private static final List<String> TESTS = List.of("rewind", "reorder");

  private final Arguments given;

  Run(Arguments given) {
    this.given = given;
  }

  int[][] prompts() {
    return given.rows("--prompt");
  }

  /** The tokens to follow, as many for each prompt; none where none are given. */
  int[][] followed() {
    int prompts = prompts().length;
    int[][] rows = given.has("--follow") ? given.rows("--follow") : new int[prompts][0];
    if (rows.length != prompts
        || Arrays.stream(rows).anyMatch(row -> row.length != rows[0].length)) {
      throw new IllegalArgumentException("--follow: the same number of ids for each --prompt");
    }
    return rows;
  }

  /**
   * The likeliest token after the prompt and after each given one, whatever was likeliest.
   *
   * @param onStep called after each call
   */
  List<List<Integer>> follow(Decoder decoder, Runnable onStep) throws OrtException {
    int[][] follow = followed();
    List<String> tests = tests(follow);
    List<List<Integer>> made = new ArrayList<>();
    for (float[] row : decoder.prefill(prompts())) {
      made.add(new ArrayList<>(List.of(Decoder.likeliest(row))));
    }
    onStep.run();
    for (int i = 0; i < follow[0].length; i++) {
      float[][] logits = decoder.step(column(follow, i));
      onStep.run();
      for (int row = 0; row < follow.length; row++) {
        made.get(row).add(Decoder.likeliest(logits[row]));
      }
    }
    selfTest(decoder, tests, follow, made);
    return made;
  }

  private static int[][] column(int[][] rows, int column) {
    return Arrays.stream(rows).map(row -> new int[] {row[column]}).toArray(int[][]::new);
  }

  /** What is tried after the last step. */
  private List<String> tests(int[][] follow) {
    if (!given.has("--self-test")) {
      return List.of();
    }
    List<String> tests = List.of(given.one("--self-test").split(","));
    if (!TESTS.containsAll(tests)) {
      throw new IllegalArgumentException(
          "--self-test knows " + String.join(" and ", TESTS) + ", not " + String.join(",", tests));
    }
    if (follow[0].length == 0) {
      throw new IllegalArgumentException("--self-test needs tokens to --follow");
    }
    return tests;
  }

  /** Takes the last step again after going back, and after changing rows. */
  private static void selfTest(
      Decoder decoder, List<String> tests, int[][] follow, List<List<Integer>> made)
      throws OrtException {
    int[][] last =
        Arrays.stream(follow)
            .map(row -> Arrays.copyOfRange(row, row.length - 1, row.length))
            .toArray(int[][]::new);
    int[] expected = made.stream().mapToInt(row -> row.get(row.size() - 1)).toArray();
    if (tests.contains("rewind")) {
      decoder.rewind(1);
      compare("rewind", decoder.step(last), expected);
    }
    if (tests.contains("reorder")) {
      decoder.rewind(1);
      // The rows backwards, and the first one once more.
      int[] order = IntStream.rangeClosed(0, last.length).map(i -> last.length - 1 - i).toArray();
      order[last.length] = 0;
      decoder.reorder(order);
      compare(
          "reorder",
          decoder.step(IntStream.of(order).mapToObj(row -> last[row]).toArray(int[][]::new)),
          IntStream.of(order).map(row -> expected[row]).toArray());
    }
  }

  private static void compare(String name, float[][] logits, int[] expected) {
    int[] got = Arrays.stream(logits).mapToInt(Decoder::likeliest).toArray();
    if (!Arrays.equals(got, expected)) {
      throw new IllegalStateException(
          name + ": " + Arrays.toString(got) + " in place of " + Arrays.toString(expected));
    }
  }
}
