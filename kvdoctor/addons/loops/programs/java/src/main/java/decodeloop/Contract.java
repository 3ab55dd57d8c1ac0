package decodeloop;

import ai.onnxruntime.NodeInfo;
import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import com.google.gson.FieldNamingPolicy;
import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonPrimitive;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.stream.IntStream;

/**
 * What contract.json says of a model: its calls, what each is fed, and what becomes of the outputs.
 *
 * @param calls of each phase (encode, prefill, decode), in order
 * @param zeros the values before the first call
 * @param cut the axes that a rewind cuts, and {@code rows} those that a reorder changes
 * @param source what {@link Decoder#encode} takes, or null
 * @param vocabulary token ids are smaller
 * @param contextLimit the most tokens of the cache
 * @param longest the most tokens of a sequence: those that do not fit are written over the oldest
 * @param oneToken whether every call takes one new token
 * @param batch the number of sequences where the graph takes one only, or null
 * @param capacityIsChosen whether the caller chooses the room of the cache
 * @param pads whether prompts of unequal length are padded on the left
 * @param chunks whether a step may take several new tokens
 * @param placeholders tokens in whose places an image or sound belongs
 */
public record Contract(
    String schema,
    String model,
    List<ModelFile> files,
    Map<String, List<Call>> calls,
    List<Zeros> zeros,
    List<Axis> cut,
    List<Axis> rows,
    int heads,
    Source source,
    int vocabulary,
    int contextLimit,
    int longest,
    boolean oneToken,
    Integer batch,
    boolean capacityIsChosen,
    boolean pads,
    boolean chunks,
    boolean rewinds,
    boolean reorders,
    Set<Integer> placeholders,
    Ids generation) {

  private static final String SCHEMA = "kvdoctor/loop/4";
  static final Gson GSON =
      new GsonBuilder()
          .setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES)
          .serializeNulls()
          .create();

  /** A file of the model, with its inputs and the outputs that are used. */
  public record ModelFile(String file, Map<String, Port> inputs, List<String> outputs) {}

  /** The element type of an input and its sizes; -1 is any. */
  public record Port(String dtype, long[] shape) {}

  /**
   * A call of a file.
   *
   * @param values the names of the values that inputs are fed
   * @param logits the output of which the next token is made, or null
   * @param sizes those that only values have
   */
  public record Call(
      String file,
      Map<String, String> values,
      List<Made> made,
      Set<String> outputs,
      String logits,
      List<Take> takes,
      Map<String, Axis> sizes) {}

  /** What names the value that becomes another one. */
  interface Change {
    String value();
  }

  /** An output that becomes a value, by a rule along an axis. */
  public record Take(String output, String value, String carry, Integer axis) implements Change {}

  /** An axis of a value; a sequence has {@code each} entries of it. */
  public record Axis(String value, int axis, int each) implements Change {}

  /** A value before the first call. */
  public record Zeros(String value, String dtype, List<JsonPrimitive> dims) {}

  /** What the caller gives before the prompts; it may have a mask where it is {@code masked}. */
  public record Source(
      String dtype, List<JsonPrimitive> dims, Integer batchAxis, int lengthAxis, boolean masked) {}

  /**
   * An input that is made for a call, row by row along its last axis. A row has {@code inside} from
   * the column {@code begin} to before {@code end}, and {@code step} more for each column, else
   * {@code outside}; what {@code copy} names is written over it. Each sum has numbers with factors.
   */
  public record Made(
      String name,
      String dtype,
      List<JsonPrimitive> dims,
      Integer batchAxis,
      String copy,
      Map<String, Double> begin,
      Map<String, Double> end,
      Map<String, Double> inside,
      double outside,
      double step) {}

  /**
   * Ids of the configs; each of {@code forced} is a position, from the prompt's first, and an id.
   */
  public record Ids(
      List<Integer> start,
      List<Integer> end,
      List<Integer> suppress,
      List<Integer> beginSuppress,
      List<int[]> forced) {}

  /** Reads a contract.json. */
  public static Contract read(Path file) throws IOException {
    return parse(Files.readString(file));
  }

  /** Reads the text of a contract.json. */
  public static Contract parse(String text) {
    Contract contract = GSON.fromJson(text, Contract.class);
    String schema = contract == null ? null : contract.schema;
    String other = "the contract has schema " + schema + ", and this program reads " + SCHEMA;
    require(SCHEMA.equals(schema), other);
    return contract;
  }

  static void require(boolean holds, String otherwise) {
    if (!holds) {
      throw new IllegalArgumentException(otherwise);
    }
  }

  /** Fails where a session is not one of the file that the contract describes. */
  static void compare(ModelFile file, OrtSession session) throws OrtException {
    String other = "contract.json is of another model than " + file.file + ": ";
    Map<String, NodeInfo> inputs = session.getInputInfo();
    for (Map.Entry<String, NodeInfo> input : inputs.entrySet()) {
      TensorInfo found = (TensorInfo) input.getValue().getInfo();
      Port due = file.inputs.get(input.getKey());
      boolean fits = due != null && typeOf(due.dtype) == found.type && fits(found, due.shape);
      require(fits, other + "it has the input " + input.getKey() + " as " + found);
    }
    for (String name : file.inputs.keySet()) {
      require(inputs.containsKey(name), other + "it has no input " + name);
    }
    for (String name : file.outputs) {
      require(session.getOutputNames().contains(name), other + "it has no output " + name);
      // The runtime would return the very memory that was fed, which the binding frees.
      require(!inputs.containsKey(name), "output " + name + " is an input as well; rename it");
    }
  }

  /** Whether each size that is known is the one that is due; a graph may declare none. */
  private static boolean fits(TensorInfo found, long[] due) {
    long[] shape = found.getShape();
    IntStream axes = IntStream.range(0, shape.length);
    return shape.length == 0
        || shape.length == due.length && axes.allMatch(i -> shape[i] < 0 || shape[i] == due[i]);
  }

  static OnnxJavaType typeOf(String dtype) {
    return OnnxJavaType.valueOf(dtype.toUpperCase(Locale.ROOT));
  }
}
