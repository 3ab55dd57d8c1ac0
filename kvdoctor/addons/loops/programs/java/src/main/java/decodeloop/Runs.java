package decodeloop;

import ai.onnxruntime.OrtException;
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
  private static final String SCHEMA = "kvdoctor/loop-vectors/2";

  /** Stands for a token that is not compared. */
  private static final int ANY = -1;

  private record Run(String name, List<Call> calls) {}

  /** A call of the decoder; {@code expect} is the likeliest token of each sequence after it. */
  record Call(
      String call, int[][] rows, String file, long[] shape, int count, int[] order, int[] expect) {

    /** Makes the call; the logits that it returns, or null. */
    Logits make(Decoder decoder, Path folder) throws OrtException, IOException {
      switch (call) {
        case "prefill":
          return decoder.prefill(rows);
        case "step":
          return decoder.step(rows);
        case "encode":
          decoder.encode(rows, null);
          break;
        case "encode-file":
          byte[] bytes = Files.readAllBytes(folder.resolve(file));
          FloatBuffer values =
              ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
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
      return null;
    }

    private boolean expects(List<Integer> tokens) {
      return IntStream.range(0, expect.length)
          .allMatch(row -> expect[row] == ANY || expect[row] == tokens.get(row));
    }
  }

  private record Ended(String run, List<List<Integer>> tokens, String error) {}

  /** Reads the runs of a file. */
  static Runs read(String text) {
    Runs read = Contract.GSON.fromJson(text, Runs.class);
    boolean known = read != null && SCHEMA.equals(read.schema) && !read.runs.isEmpty();
    Contract.require(known, "there are no runs of the schema " + SCHEMA);
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
      String problem = null;
      String error = null;
      try {
        for (Call call : run.calls) {
          Logits logits = call.make(decoder, folder);
          if (logits != null) {
            List<Integer> found = logits.likeliest();
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
      decoder.trace(null);
      record.accept(Contract.GSON.toJson(new Ended(run.name, tokens, error)));
      said.accept(run.name + ": " + (problem == null ? "as expected" : problem));
      right &= problem == null;
    }
    return right;
  }
}
