package decodeloop;

import ai.onnxruntime.OrtException;
import com.google.gson.JsonElement;
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

/** Plays the runs of vectors.json and compares their tokens. */
record Runs(String schema, List<Run> runs) {
  private static final String SCHEMA = "kvdoctor/loop-vectors/1";

  /** Stands for a token that is not compared. */
  private static final int ANY = -1;

  /**
   * A run.
   *
   * @param follow what each sequence continues with
   * @param source a list of ids for each sequence, or a file with its shape, or null
   * @param expect the likeliest token after the prompt and after each followed token
   * @param selfTest what is tried after the last step: rewind, reorder, or null for nothing
   */
  private record Run(
      String name,
      int[][] prompts,
      int[][] follow,
      JsonElement source,
      List<List<Integer>> expect,
      String selfTest) {}

  /** An array in a file of float32, little endian. */
  record SourceFile(String file, long[] shape) {}

  private record Ended(String run, List<List<Integer>> tokens, String error) {}

  /** Reads the runs of a file. */
  static Runs read(String text) {
    Runs read = Contract.GSON.fromJson(text, Runs.class);
    if (read == null || !SCHEMA.equals(read.schema) || read.runs.isEmpty()) {
      throw new IllegalArgumentException("there are no runs of the schema " + SCHEMA);
    }
    return read;
  }

  /**
   * Decodes each run, and says whether all tokens are the expected ones.
   *
   * @param folder where the files of sources are
   * @param record takes the calls and tokens as lines of JSON
   */
  boolean play(Decoder decoder, Path folder, Consumer<String> record, Consumer<String> said) {
    boolean right = true;
    for (Run run : runs) {
      decoder.reset();
      String named = "{\"run\":" + Contract.GSON.toJson(run.name) + ",";
      decoder.trace(line -> record.accept(named + line.substring(1)));
      List<List<Integer>> tokens = new ArrayList<>();
      String error = null;
      try {
        encode(decoder, run.source, folder);
        follow(decoder, run, tokens);
      } catch (CancellationException failed) {
        throw failed;
      } catch (OrtException | IOException | RuntimeException failed) {
        error = failed.getMessage();
      }
      record.accept(Contract.GSON.toJson(new Ended(run.name, tokens, error)));
      String problem = error == null ? difference(run.expect, tokens) : "error: " + error;
      said.accept(run.name + ": " + (problem == null ? "as expected" : problem));
      right &= problem == null;
    }
    return right;
  }

  private static String difference(List<List<Integer>> expect, List<List<Integer>> made) {
    for (int row = 0; row < expect.size(); row++) {
      for (int step = 0; step < expect.get(row).size(); step++) {
        int wanted = expect.get(row).get(step);
        int token = made.get(row).get(step);
        if (wanted != ANY && token != wanted) {
          String place = "sequence " + row + ", step " + step;
          return place + ": token " + token + " in place of " + wanted;
        }
      }
    }
    return null;
  }

  /** Gives a source to the decoder: ids, the shorter ones padded on the right, or a file. */
  static void encode(Decoder decoder, JsonElement source, Path folder)
      throws OrtException, IOException {
    if (source == null || source.isJsonNull()) {
      return;
    }
    if (source.isJsonObject()) {
      SourceFile given = Contract.GSON.fromJson(source, SourceFile.class);
      byte[] bytes = Files.readAllBytes(folder.resolve(given.file));
      FloatBuffer values = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
      float[] floats = new float[values.remaining()];
      values.get(floats);
      decoder.encode(floats, given.shape, null);
      return;
    }
    int[][] rows = Contract.GSON.fromJson(source, int[][].class);
    int longest = Arrays.stream(rows).mapToInt(row -> row.length).max().orElse(0);
    int[][] mask = new int[rows.length][longest];
    for (int row = 0; row < rows.length; row++) {
      Arrays.fill(mask[row], 0, rows[row].length, 1);
    }
    int[][] padded =
        Arrays.stream(rows).map(row -> Arrays.copyOf(row, longest)).toArray(int[][]::new);
    boolean even = Arrays.stream(rows).allMatch(row -> row.length == longest);
    decoder.encode(padded, even ? null : mask);
  }

  /** The likeliest token after the prompt and after each given one, whatever was likeliest. */
  private static void follow(Decoder decoder, Run run, List<List<Integer>> made)
      throws OrtException {
    int[] likeliest = likeliest(decoder.prefill(run.prompts));
    IntStream.of(likeliest).forEach(token -> made.add(new ArrayList<>(List.of(token))));
    int[][] last = {};
    for (int step = 0; step < run.follow[0].length; step++) {
      int at = step;
      last = Arrays.stream(run.follow).map(row -> new int[] {row[at]}).toArray(int[][]::new);
      likeliest = likeliest(decoder.step(last));
      for (int row = 0; row < likeliest.length; row++) {
        made.get(row).add(likeliest[row]);
      }
    }
    if (run.selfTest != null) {
      takeAgain(decoder, run.selfTest, last, likeliest);
    }
  }

  /** Takes the last step again after going back, or also with other rows. */
  private static void takeAgain(Decoder decoder, String test, int[][] last, int[] likeliest)
      throws OrtException {
    decoder.rewind(1);
    int[] order = IntStream.range(0, last.length).toArray();
    if (test.equals("reorder")) { // the rows backwards, and the first one once more
      order = IntStream.rangeClosed(0, last.length).map(i -> last.length - 1 - i).toArray();
      order[last.length] = 0;
      decoder.reorder(order);
    }
    int[][] again = IntStream.of(order).mapToObj(row -> last[row]).toArray(int[][]::new);
    String got = Arrays.toString(likeliest(decoder.step(again)));
    String due = Arrays.toString(IntStream.of(order).map(row -> likeliest[row]).toArray());
    if (!got.equals(due)) {
      throw new IllegalStateException(test + ": " + got + " in place of " + due);
    }
  }

  private static int[] likeliest(Logits logits) {
    return IntStream.range(0, logits.sequences())
        .map(i -> Logits.likeliest(logits.last(i)))
        .toArray();
  }
}
