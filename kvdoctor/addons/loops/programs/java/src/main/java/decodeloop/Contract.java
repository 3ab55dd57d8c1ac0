package decodeloop;

import ai.onnxruntime.NodeInfo;
import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import com.google.gson.FieldNamingPolicy;
import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonDeserializer;
import com.google.gson.JsonParseException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * What contract.json says of a model: its calls, what each is fed, and what becomes of the cache.
 *
 * @param source what {@link Decoder#encode} takes, or null
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
    String layout,
    List<ModelFile> files,
    Calls calls,
    List<Slot> slots,
    Input source,
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
  private static final Set<String> CARRIES =
      Set.of("feed-back", "hold", "append", "shift", "drop-oldest", "write");
  private static final Map<String, OnnxJavaType> TYPES =
      Stream.of(OnnxJavaType.values())
          .filter(type -> type != OnnxJavaType.STRING && type != OnnxJavaType.UNKNOWN)
          .collect(Collectors.toMap(type -> type.name().toLowerCase(Locale.ROOT), type -> type));
  private static final Gson GSON =
      new GsonBuilder()
          .setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES)
          .registerTypeAdapter(
              Dim.class,
              (JsonDeserializer<Dim>)
                  (json, type, context) ->
                      json.getAsJsonPrimitive().isNumber()
                          ? new Dim(json.getAsLong(), null)
                          : new Dim(-1, json.getAsString()))
          .create();

  /** The calls that a model has; {@code encode} and {@code embed} may be null. */
  public record Calls(Call encode, Call embed, Call prefill, Call decode) {
    Stream<Call> all() {
      return Stream.of(encode, embed, prefill, decode).filter(Objects::nonNull);
    }
  }

  /** A file of the model, with the inputs and outputs that its calls use. */
  public record ModelFile(String file, Map<String, Type> inputs, List<String> outputs) {}

  /** The element type and the shape of a tensor. */
  public record Type(String dtype, List<Dim> dims) {}

  /** A kind of call. {@code logits} and {@code states} are names of outputs, or null. */
  public record Call(
      String file,
      List<Input> inputs,
      List<String> pasts,
      Set<String> outputs,
      String logits,
      String states) {
    boolean follows(String rule) {
      return inputs.stream().anyMatch(one -> one.rule.equals(rule));
    }
  }

  /** An input that is not of the cache, and the rule by which its value is made. */
  public record Input(
      String name,
      String dtype,
      List<Dim> dims,
      String rule,
      String count,
      double value,
      double shown,
      double hidden,
      boolean fromRight,
      String made) {}

  /** A tensor of the cache: the input that it is fed to, the outputs that fill it and carry it. */
  public record Slot(
      String past,
      String present,
      String made,
      boolean byEncoder,
      String dtype,
      List<Dim> dims,
      String carry,
      Integer batchAxis,
      Integer lengthAxis,
      boolean countsStates,
      String rewinds,
      long firstLength,
      int heads,
      boolean fedZeros) {
    /** Whether the loop computes the next value; otherwise it passes on what it got. */
    boolean copies() {
      return !Set.of("feed-back", "hold").contains(carry) && lengthAxis != null && present != null;
    }
  }

  /** The size of an axis: a number, or the name of what it counts. */
  public record Dim(long size, String axis) {}

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
    try {
      return parse(Files.readString(file));
    } catch (IllegalArgumentException failed) {
      throw new IllegalArgumentException(file + ": " + failed.getMessage(), failed);
    }
  }

  /** Reads the text of a contract.json. What this program does not know is refused. */
  public static Contract parse(String text) {
    Contract contract;
    try {
      contract = GSON.fromJson(text, Contract.class);
    } catch (JsonParseException failed) {
      throw new IllegalArgumentException(failed.getMessage(), failed);
    }
    if (contract == null || !SCHEMA.equals(contract.schema)) {
      String found = contract == null ? "" : contract.schema;
      throw new IllegalArgumentException(
          "its schema is " + found + ", and this program reads " + SCHEMA);
    }
    contract.calls.all().flatMap(call -> call.inputs.stream()).forEach(Contract::requireKnown);
    for (Slot slot : contract.slots) {
      require(CARRIES.contains(slot.carry), "cache ", slot.past, "becomes what is unknown here");
      require(typeOf(slot.dtype).isPresent(), "cache ", slot.past, "has an unknown element type");
    }
    return contract;
  }

  private static void requireKnown(Input one) {
    boolean known = Inputs.RULES.contains(one.rule) && Inputs.COUNTS.contains(one.count);
    String said = "follows a rule that is unknown here: " + one.rule + " " + one.count;
    require(known, "input ", one.name, said);
    require(typeOf(one.dtype).isPresent(), "input ", one.name, "has an unknown element type");
  }

  private static void require(boolean holds, String what, String name, String said) {
    if (!holds) {
      throw new IllegalArgumentException(what + Tensors.quoted(name) + " " + said);
    }
  }

  static Optional<OnnxJavaType> typeOf(String dtype) {
    return Optional.ofNullable(TYPES.get(dtype));
  }

  /** Fails where a session is not one of the file that the contract describes. */
  static void compare(ModelFile file, OrtSession session) throws OrtException {
    try {
      Map<String, NodeInfo> inputs = session.getInputInfo();
      for (Map.Entry<String, NodeInfo> input : inputs.entrySet()) {
        Type given = file.inputs.get(input.getKey());
        require(given != null, "input ", input.getKey(), "is not in the contract");
        compare(input.getKey(), given, (TensorInfo) input.getValue().getInfo());
      }
      for (String name : file.inputs.keySet()) {
        require(inputs.containsKey(name), "input ", name, "is not in the model");
      }
      for (String name : file.outputs) {
        boolean there = session.getOutputNames().contains(name);
        require(there, "output ", name, "is not in the model");
        // The runtime would return the very memory that was fed, which the binding frees.
        require(!inputs.containsKey(name), "output ", name, "is an input as well; rename it");
      }
    } catch (IllegalArgumentException failed) {
      throw new IllegalArgumentException(
          "contract.json is of another model than " + file.file + ": " + failed.getMessage());
    }
  }

  private static void compare(String name, Type given, TensorInfo found) {
    boolean same = typeOf(given.dtype).filter(found.type::equals).isPresent();
    require(same, "input ", name, "has elements of " + found.type);
    long[] shape = found.getShape();
    int rank = given.dims.size();
    require(shape.length == 0 || shape.length == rank, "input ", name, "has other axes");
    for (int axis = 0; axis < shape.length; axis++) {
      Dim dim = given.dims.get(axis);
      boolean fits = shape[axis] < 0 || dim.axis == null && dim.size == shape[axis];
      require(fits, "input ", name, "has the size " + shape[axis]);
    }
  }
}
