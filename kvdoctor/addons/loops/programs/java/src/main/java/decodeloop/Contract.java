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
import java.util.Objects;
import java.util.Set;
import java.util.stream.Stream;

/**
 * What contract.json says of a model: its calls, what each is fed, and what becomes of the cache.
 *
 * @param source what {@link Decoder#encode} takes, or null
 * @param sourceAxis the axis of the source that is its length
 * @param vocabulary entries of a row of logits, or null
 * @param contextLimit the most tokens of a sequence, or null
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
    Calls calls,
    List<Slot> slots,
    Input source,
    Integer sourceAxis,
    Integer vocabulary,
    Integer contextLimit,
    boolean oneToken,
    Integer batch,
    boolean capacityIsChosen,
    boolean pads,
    boolean chunks,
    boolean rewinds,
    boolean reorders,
    Set<Integer> placeholders,
    Ids generation) {

  private static final String SCHEMA = "kvdoctor/loop/2";
  static final Gson GSON =
      new GsonBuilder()
          .setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES)
          .serializeNulls()
          .create();

  /** The calls that a model has; {@code encode} and {@code embed} may be null. */
  public record Calls(Call encode, Call embed, Call prefill, Call decode) {}

  /** A file of the model, with its inputs and the outputs that are used. */
  public record ModelFile(String file, Map<String, Type> inputs, List<String> outputs) {}

  /** The element type of a tensor and its sizes: numbers, or the names of what an axis counts. */
  public record Type(String dtype, List<JsonPrimitive> dims) {}

  /** A kind of call. {@code encoder} is where it finds the number of encoder states, or null. */
  public record Call(
      String file,
      List<Input> inputs,
      List<String> pasts,
      Set<String> outputs,
      String logits,
      List<Fill> fills,
      EncoderSize encoder) {
    boolean follows(String rule) {
      return inputs.stream().anyMatch(one -> one.rule.equals(rule));
    }
  }

  /** An output that goes into the cache: the number of the slot, and what becomes of it there. */
  public record Fill(int slot, String output, String carry) {}

  /** The axis of a tensor that counts encoder states. */
  public record EncoderSize(String place, String name, int axis) {}

  /** An input that is not of the cache, and the rule by which its value is made. */
  public record Input(
      String name,
      String dtype,
      List<JsonPrimitive> dims,
      String rule,
      String count,
      double value,
      double shown,
      double hidden,
      boolean fromRight,
      String rowsFrom,
      Integer batchAxis,
      String made) {}

  /** A tensor of the cache; {@code zeros} is the shape of the first value that the loop makes. */
  public record Slot(
      String past,
      String dtype,
      List<JsonPrimitive> zeros,
      Integer batchAxis,
      Integer lengthAxis,
      String rewinds,
      int heads) {}

  /**
   * Ids of the configs; each of {@code forced} is a position, from the prompt's first, and an id.
   */
  public record Ids(
      List<Integer> start,
      List<Integer> end,
      Integer padding,
      List<Integer> suppress,
      List<Integer> beginSuppress,
      List<int[]> forced) {}

  /** Reads a contract.json. */
  public static Contract read(Path file) throws IOException {
    return parse(Files.readString(file));
  }

  /** Reads the text of a contract.json. What this program does not know is refused. */
  public static Contract parse(String text) {
    Contract contract = GSON.fromJson(text, Contract.class);
    String schema = contract == null ? null : contract.schema;
    String other = "the contract has schema " + schema + ", and this program reads " + SCHEMA;
    require(SCHEMA.equals(schema), other);
    Calls calls = contract.calls;
    Stream.of(calls.encode, calls.embed, calls.prefill, calls.decode)
        .filter(Objects::nonNull)
        .forEach(
            call -> {
              for (Input one : call.inputs) {
                boolean known = Inputs.RULES.contains(one.rule);
                require(known, one.name + " follows an unknown rule: " + one.rule);
              }
              for (Fill one : call.fills) {
                boolean known = Cache.CARRIES.contains(one.carry);
                require(known, one.output + " is carried by an unknown rule: " + one.carry);
              }
            });
    return contract;
  }

  private static void require(boolean holds, String otherwise) {
    if (!holds) {
      throw new IllegalArgumentException(otherwise);
    }
  }

  /** Fails where a session is not one of the file that the contract describes. */
  static void compare(ModelFile file, OrtSession session) throws OrtException {
    String other = "contract.json is of another model than " + file.file + ": ";
    Map<String, NodeInfo> inputs = session.getInputInfo();
    for (String name : inputs.keySet()) {
      require(file.inputs.containsKey(name), other + "it has an input " + name);
    }
    for (Map.Entry<String, Type> due : file.inputs.entrySet()) {
      String name = due.getKey();
      require(inputs.containsKey(name), other + "it has no input " + name);
      TensorInfo found = (TensorInfo) inputs.get(name).getInfo();
      List<JsonPrimitive> dims = due.getValue().dims;
      require(typeOf(due.getValue().dtype) == found.type, other + name + " has " + found.type);
      long[] shape = found.getShape();
      require(shape.length == 0 || shape.length == dims.size(), other + name + " has other axes");
      for (int axis = 0; axis < shape.length; axis++) {
        JsonPrimitive dim = dims.get(axis);
        boolean fits = shape[axis] < 0 || dim.isNumber() && dim.getAsLong() == shape[axis];
        require(fits, other + name + " has the size " + shape[axis] + " for " + dim);
      }
    }
    for (String name : file.outputs) {
      require(session.getOutputNames().contains(name), other + "it has no output " + name);
      // The runtime would return the very memory that was fed, which the binding frees.
      require(!inputs.containsKey(name), "output " + name + " is an input as well; rename it");
    }
  }

  static OnnxJavaType typeOf(String dtype) {
    return OnnxJavaType.valueOf(dtype.toUpperCase(Locale.ROOT));
  }
}
