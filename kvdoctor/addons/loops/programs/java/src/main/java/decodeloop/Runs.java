package decodeloop;

import ai.onnxruntime.OrtException;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CancellationException;
import java.util.stream.IntStream;

/** Plays the runs of vectors.json and compares their tokens. */
record Runs(String schema, List<Run> runs) {
  private static final String SCHEMA = "kvdoctor/loop-vectors/2";

  /** Stands for a token that is not compared. */
  private static final int ANY = -1;

  private record Run(String name, List<Call> calls) {}

  /** A call of the decoder; {@code expect} is the likeliest token of each sequence after it. */
  record Call(
      String call,
      int[][] rows,
      String file,
      long[] shape,
      int count,
      int[] order,
      int[] expect,
      Integer most,
      Set<Integer> stop,
      double temperature,
      int topK,
      double topP,
      double minP,
      double repetitionPenalty,
      long seed) {

    /** Makes the call: the tokens of each sequence that it generates, or the likeliest one. */
    List<List<Integer>> make(Decoder decoder, Path folder) throws OrtException, IOException {
      switch (call) {
        case "prefill":
          return decoder.prefill(rows).likeliest();
        case "step":
          return decoder.step(rows).likeliest();
        case "generate":
          Sampling how = new Sampling(temperature, topK, topP, minP, repetitionPenalty, seed);
          return decoder.generate(
              rows, new Generation(most == null ? 20 : most, stop, how.choice(), false));
        case "encode":
          decoder.encode(rows);
          break;
        case "encode-file":
          ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(folder.resolve(file)));
          FloatBuffer values = bytes.order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
          float[] floats = new float[values.remaining()];
          values.get(floats);
          decoder.encode(floats, shape, null);
          break;
        case "rewind":
          decoder.rewind(count);
          break;
        case "reorder":
          decoder.reorder(order);
          break;
        default:
          throw new IllegalArgumentException("there is no call " + call);
      }
      return List.of();
    }

    private boolean expects(List<Integer> tokens) {
      return IntStream.range(0, expect.length)
          .allMatch(row -> expect[row] == ANY || expect[row] == tokens.get(row));
    }
  }

  private record Ended(String run, List<List<Integer>> tokens, String error) {}

  /** Reads a list of calls, which have no keys but those of {@link Call}. */
  static List<Call> calls(String json) {
    List<Call> calls = new ArrayList<>();
    for (JsonElement given : JsonParser.parseString(json).getAsJsonArray()) {
      Call call = Contract.GSON.fromJson(given, Call.class);
      JsonObject known = Contract.GSON.toJsonTree(call).getAsJsonObject();
      for (String key : given.getAsJsonObject().keySet()) {
        Contract.require(known.has(key), "a call takes no " + key);
      }
      calls.add(call);
    }
    return calls;
  }

  /**
   * Plays the runs of a file, and says whether all tokens are the expected ones.
   *
   * @param lines takes the calls and tokens as lines of JSON, or null
   */
  static boolean play(Decoder decoder, Path file, PrintStream lines) throws IOException {
    String text = Files.readString(file);
    Runs read = Contract.GSON.fromJson(text, Runs.class);
    boolean known = read != null && SCHEMA.equals(read.schema) && !read.runs.isEmpty();
    Contract.require(known, "there are no runs of the schema " + SCHEMA);
    PrintStream record = lines == null ? new PrintStream(PrintStream.nullOutputStream()) : lines;
    record.println(text.strip().replace('\n', ' ')); // the runs that are due
    boolean right = true;
    for (Run run : read.runs) {
      decoder.reset();
      String named = "{\"run\":" + Contract.GSON.toJson(run.name) + ",";
      decoder.trace(line -> record.println(named + line.substring(1)));
      List<List<Integer>> tokens = new ArrayList<>();
      String problem = null;
      String error = null;
      try {
        for (Call call : run.calls) {
          List<Integer> found =
              call.make(decoder, file.getParent()).stream().flatMap(List::stream).toList();
          if (call.expect != null) {
            if (problem == null && !call.expects(found)) {
              String due = Arrays.toString(call.expect);
              problem = "step " + tokens.size() + ": " + found + " in place of " + due;
            }
            tokens.add(found);
          }
        }
      } catch (CancellationException failed) {
        throw failed;
      } catch (OrtException | IOException | RuntimeException failed) {
        error = String.valueOf(failed.getMessage());
        problem = "error: " + error;
      }
      record.println(Contract.GSON.toJson(new Ended(run.name, tokens, error)));
      System.out.println(run.name + ": " + (problem == null ? "as expected" : problem));
      right &= problem == null;
    }
    return right;
  }
}
