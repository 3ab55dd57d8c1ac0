package decodeloop;

import ai.onnxruntime.OrtException;
import com.google.gson.FieldNamingPolicy;
import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CancellationException;
import java.util.function.Consumer;
import java.util.stream.IntStream;

/**
 * What is decoded: given on the command line, or a run of vectors.json.
 *
 * @param follow what each sequence continues with; none where the model chooses
 * @param source a list of ids for each sequence, or a file with its shape, or null
 * @param expect the likeliest token after the prompt and after each followed token
 * @param selfTest what is tried after the last step: rewind, reorder, or both; null for nothing
 */
record Run(
    String name,
    int[][] prompts,
    int[][] follow,
    JsonElement source,
    int[][] expect,
    String selfTest) {
  private static final String SCHEMA = "kvdoctor/loop-vectors/1";

  /** Stands for a token that is not compared. */
  private static final int ANY = -1;

  private static final Gson GSON =
      new GsonBuilder()
          .setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES)
          .serializeNulls()
          .create();

  private record Vectors(String schema, List<Run> runs) {}

  private record SourceFile(String file, long[] shape) {}

  private record Ended(String run, List<List<Integer>> tokens, String error) {}

  Run {
    follow = follow == null || follow.length == 0 ? new int[prompts.length][0] : follow;
    int steps = follow.length == 0 ? 0 : follow[0].length;
    if (follow.length != prompts.length
        || Arrays.stream(follow).anyMatch(row -> row.length != steps)) {
      throw new IllegalArgumentException("--follow: the same number of ids for each --prompt");
    }
    if (selfTest != null && !selfTest.matches("(rewind|reorder)(,(rewind|reorder))*")) {
      throw new IllegalArgumentException("--self-test takes rewind and reorder, not " + selfTest);
    }
    if (selfTest != null && steps == 0) {
      throw new IllegalArgumentException("--self-test needs tokens to --follow");
    }
  }

  /** The run of a command line. */
  static Run of(Arguments given) {
    given.one("--prompt");
    JsonElement source = null;
    if (given.has("--source-shape")) {
      JsonObject file = new JsonObject();
      file.addProperty("file", given.one("--source"));
      file.add("shape", GSON.toJsonTree(given.rows("--source-shape")[0]));
      source = file;
    } else if (given.has("--source")) {
      source = GSON.toJsonTree(given.rows("--source"));
    }
    String test = given.one("--self-test", null);
    int[][] follow = given.rows("--follow");
    return new Run("", given.rows("--prompt"), follow, source, new int[0][], test);
  }

  /**
   * Decodes the runs of a file and compares their tokens.
   *
   * @param record takes the calls and tokens as lines of JSON
   * @param said takes a line for each run
   * @return whether all tokens are the expected ones
   */
  static boolean play(Decoder decoder, Path file, Consumer<String> record, Consumer<String> said)
      throws IOException {
    String text = Files.readString(file);
    Vectors vectors;
    try {
      vectors = GSON.fromJson(text, Vectors.class);
    } catch (JsonParseException failed) {
      throw new IllegalArgumentException(file + ": " + failed.getMessage(), failed);
    }
    if (vectors == null || !SCHEMA.equals(vectors.schema) || vectors.runs.isEmpty()) {
      throw new IllegalArgumentException(file + " has no runs of the schema " + SCHEMA);
    }
    record.accept(text.strip().replace('\n', ' ')); // the runs that are due
    boolean right = true;
    for (Run run : vectors.runs) {
      decoder.trace(run.name, record);
      List<List<Integer>> tokens = List.of();
      String error = null;
      try {
        decoder.reset();
        run.encode(decoder, file.toAbsolutePath().getParent());
        tokens = run.decode(decoder, () -> {});
      } catch (CancellationException failed) {
        throw failed;
      } catch (OrtException | IOException | IllegalArgumentException | IllegalStateException e) {
        error = e.getMessage();
      }
      record.accept(GSON.toJson(new Ended(run.name, tokens, error)));
      String problem = error == null ? run.difference(tokens) : "error: " + error;
      said.accept(run.name + ": " + (problem == null ? "as expected" : problem));
      right &= problem == null;
    }
    return right;
  }

  /** The first token that is not the expected one, in words; null where all are. */
  private String difference(List<List<Integer>> made) {
    for (int row = 0; row < expect.length; row++) {
      List<Integer> tokens = row < made.size() ? made.get(row) : List.of();
      if (tokens.size() != expect[row].length) {
        return "sequence " + row + ": it has " + tokens.size() + " tokens";
      }
      for (int step = 0; step < expect[row].length; step++) {
        int wanted = expect[row][step];
        int token = tokens.get(step);
        if (wanted != ANY && token != wanted) {
          return String.format(
              "sequence %d, step %d: token %d in place of %d", row, step, token, wanted);
        }
      }
    }
    return null;
  }

  /**
   * Reads the source, which the sequences are about. Shorter texts are padded on the right.
   *
   * @param folder the folder of the file that the run names
   */
  void encode(Decoder decoder, Path folder) throws OrtException, IOException {
    if (source == null || source.isJsonNull()) {
      return;
    }
    if (source.isJsonObject()) {
      SourceFile given = GSON.fromJson(source, SourceFile.class);
      byte[] bytes = Files.readAllBytes(folder.resolve(given.file));
      FloatBuffer values = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
      float[] floats = new float[values.remaining()];
      values.get(floats);
      decoder.encode(floats, given.shape, null);
      return;
    }
    int[][] rows = GSON.fromJson(source, int[][].class);
    int longest = Arrays.stream(rows).mapToInt(row -> row.length).max().orElse(0);
    if (Arrays.stream(rows).allMatch(row -> row.length == longest)) {
      decoder.encode(rows, null);
      return;
    }
    int[][] mask = new int[rows.length][longest];
    for (int row = 0; row < rows.length; row++) {
      Arrays.fill(mask[row], 0, rows[row].length, 1);
      rows[row] = Arrays.copyOf(rows[row], longest);
    }
    decoder.encode(rows, mask);
  }

  /**
   * The likeliest token after the prompt and after each given one, whatever was likeliest. Then
   * come the self-tests.
   *
   * @param onStep called after each call
   */
  List<List<Integer>> decode(Decoder decoder, Runnable onStep) throws OrtException {
    int[] likeliest = likeliest(decoder.prefill(prompts));
    onStep.run();
    List<List<Integer>> made = new ArrayList<>();
    for (int token : likeliest) {
      made.add(new ArrayList<>(List.of(token)));
    }
    int[][] last = {};
    for (int step = 0; step < follow[0].length; step++) {
      int at = step;
      last = Arrays.stream(follow).map(row -> new int[] {row[at]}).toArray(int[][]::new);
      likeliest = likeliest(decoder.step(last));
      onStep.run();
      for (int row = 0; row < likeliest.length; row++) {
        made.get(row).add(likeliest[row]);
      }
    }
    selfTest(decoder, last, likeliest);
    return made;
  }

  /** Takes the last step again after going back, and after changing rows. */
  private void selfTest(Decoder decoder, int[][] last, int[] expected) throws OrtException {
    if (selfTest == null) {
      return;
    }
    if (selfTest.contains("rewind")) {
      decoder.rewind(1);
      compare("rewind", decoder.step(last), expected);
    }
    if (selfTest.contains("reorder")) {
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

  private static int[] likeliest(Logits logits) {
    return IntStream.range(0, logits.sequences())
        .map(i -> Logits.likeliest(logits.last(i)))
        .toArray();
  }

  private static void compare(String name, Logits logits, int[] expected) {
    int[] got = likeliest(logits);
    if (!Arrays.equals(got, expected)) {
      throw new IllegalStateException(
          name + ": " + Arrays.toString(got) + " in place of " + Arrays.toString(expected));
    }
  }
}
