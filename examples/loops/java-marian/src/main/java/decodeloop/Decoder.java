package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.StringJoiner;
import java.util.function.Consumer;
import java.util.function.IntPredicate;
import java.util.function.IntToLongFunction;
import java.util.function.ToIntFunction;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.LongStream;

/**
 * The decode loop of marian-4.57.6 (layout optimum-merged), written by kvdoctor 0.1.0.
 *
 * <pre>{@code
 * try (Decoder decoder = Decoder.open(Path.of("path/to/the/model"))) {
 *   decoder.encode(source);
 *   List<List<Integer>> tokens = decoder.generate(new int[][] {{5, 6, 7}}, 20);
 * }
 * }</pre>
 *
 * <p>All names, types and sizes are those of the cache contract of this model; README.md says it in
 * words.
 *
 * <p>The cache goes from step to step as the runtime made it, without a copy. A tensor is closed as
 * soon as the next step has replaced it.
 */
public final class Decoder implements AutoCloseable {
  private static final String ENCODER = "encoder_model.onnx";
  private static final String DECODER = "decoder_model_merged.onnx";

  /** The most tokens that a sequence may have. */
  private static final int MOST_TOKENS = 64;

  /** Token ids are smaller than this. */
  private static final int VOCABULARY = 128;

  // Sizes of the cache that are known only when the loop runs.
  private static final long BATCH = -1;
  private static final long PAST = -2;
  private static final long ENCODED = -3;

  private static final Layout SELF_ATTENTION =
      new Layout(OnnxJavaType.FLOAT, 0, 2, BATCH, 4, PAST, 8);
  private static final Layout CROSS_ATTENTION =
      new Layout(OnnxJavaType.FLOAT, 0, 2, BATCH, 4, ENCODED, 8);

  private static final List<Slot> CACHE =
      List.of(
          new Slot(
              "past_key_values.0.decoder.key",
              "present.0.decoder.key",
              "present.0.decoder.key",
              SELF_ATTENTION),
          new Slot(
              "past_key_values.0.decoder.value",
              "present.0.decoder.value",
              "present.0.decoder.value",
              SELF_ATTENTION),
          new Slot("past_key_values.0.encoder.key", "present.0.encoder.key", null, CROSS_ATTENTION),
          new Slot(
              "past_key_values.0.encoder.value", "present.0.encoder.value", null, CROSS_ATTENTION),
          new Slot(
              "past_key_values.1.decoder.key",
              "present.1.decoder.key",
              "present.1.decoder.key",
              SELF_ATTENTION),
          new Slot(
              "past_key_values.1.decoder.value",
              "present.1.decoder.value",
              "present.1.decoder.value",
              SELF_ATTENTION),
          new Slot("past_key_values.1.encoder.key", "present.1.encoder.key", null, CROSS_ATTENTION),
          new Slot(
              "past_key_values.1.encoder.value", "present.1.encoder.value", null, CROSS_ATTENTION));

  /** What the first call returns. */
  private static final Set<String> FIRST_OUTPUTS =
      Set.of(
          "logits",
          "present.0.decoder.key",
          "present.0.decoder.value",
          "present.0.encoder.key",
          "present.0.encoder.value",
          "present.1.decoder.key",
          "present.1.decoder.value",
          "present.1.encoder.key",
          "present.1.encoder.value");

  private static final Set<String> OUTPUTS =
      Set.of(
          "logits",
          "present.0.decoder.key",
          "present.0.decoder.value",
          "present.1.decoder.key",
          "present.1.decoder.value");

  private final OrtEnvironment environment = OrtEnvironment.getEnvironment();
  private final Map<String, OrtSession> sessions = new HashMap<>();

  /** The cache by the names of its inputs. */
  private final Map<String, OnnxTensor> cache = new HashMap<>();

  /** What {@link #encode} made; it stays until the next source. */
  private final Map<String, OnnxTensor> encoded = new HashMap<>();

  private int[][] sourceMask;

  /** How many sequences the source is for. */
  private int sources;

  /** Whether the source is no longer that of the caller, row by row. */
  private boolean moved;

  private int batch;
  private int length;

  /** Takes a line for each call; null where calls are not written down. */
  private Consumer<String> trace;

  /** The run that the lines belong to, or null. */
  private String run;

  /** Opens the files in {@code folder}. */
  public static Decoder open(Path folder) throws OrtException {
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      return new Decoder(folder, options);
    }
  }

  /** Opens the files in {@code folder}; the options say with which providers and threads. */
  public Decoder(Path folder, OrtSession.SessionOptions options) throws OrtException {
    String lines = System.getenv("KVDOCTOR_TRACE");
    trace = lines == null || lines.isEmpty() ? null : appendTo(Path.of(lines));
    try {
      for (String file : List.of(ENCODER, DECODER)) {
        String path = folder.resolve(file).toString();
        sessions.put(file, environment.createSession(path, options));
      }
    } catch (OrtException | RuntimeException failed) {
      close();
      throw failed;
    }
  }

  /** The number of tokens in the cache, padding counted. */
  public int length() {
    return length;
  }

  /** The most tokens that a sequence may have, padding counted. */
  public int limit() {
    return MOST_TOKENS;
  }

  /**
   * Gives each call from now on to {@code lines}, as {@code kvdoctor step-test MODEL --trace} reads
   * it.
   *
   * @param run what the lines belong to, or null
   * @param lines takes a line of JSON; null ends it
   */
  public void trace(String run, Consumer<String> lines) {
    this.run = run;
    trace = lines;
  }

  /** Begins anew: no sequences, and nothing encoded. */
  public void reset() {
    clear();
    encoded.values().forEach(OnnxTensor::close);
    encoded.clear();
    sourceMask = null;
    moved = false;
  }

  private void clear() {
    length = 0;
    cache.values().forEach(OnnxTensor::close);
    cache.clear();
  }

  /** Releases the cache and the models. */
  @Override
  public void close() throws OrtException {
    reset();
    for (OrtSession session : sessions.values()) {
      session.close();
    }
    sessions.clear();
  }

  /** Runs the encoder; the sequences after it are about this source. All of it is read. */
  public void encode(int[][] source) throws OrtException {
    encode(source, null);
  }

  /**
   * Runs the encoder; the sequences after it are about this source.
   *
   * @param source int64[batch, encoder_input]
   * @param mask 0 for padding on the right, else 1, for each sequence; null where all is read
   */
  public void encode(int[][] source, int[][] mask) throws OrtException {
    if (source.length == 0 || source[0].length == 0) {
      throw new IllegalArgumentException("the source is empty");
    }
    if (Arrays.stream(source).anyMatch(row -> row.length != source[0].length)) {
      throw new IllegalArgumentException("the rows of a source must have the same length");
    }
    if (Arrays.stream(source).flatMapToInt(Arrays::stream).anyMatch(id -> id < 0)) {
      throw new IllegalArgumentException("the ids of the source are 0 or more");
    }
    int batch = source.length;
    int sourceLength = source[0].length;
    requireMask(mask, batch, sourceLength);
    reset();
    sources = source.length;
    sourceMask = mask;
    Map<String, OnnxTensor> inputs = new HashMap<>();
    inputs.put(
        "input_ids",
        int64(i -> source[i / sourceLength][i % sourceLength], source.length, sourceLength));
    inputs.put(
        "attention_mask", int64(i -> sourceMask(i, batch, sourceLength), batch, sourceLength));
    encoded.putAll(run(ENCODER, inputs, Map.of(), Set.of("last_hidden_state")));
  }

  /**
   * Begins sequences with their prompts.
   *
   * @return the last logits of each sequence
   */
  public float[][] prefill(int[][] prompts) throws OrtException {
    if (encoded.isEmpty() || moved) {
      throw new IllegalStateException("begin with encode(), also after reorder()");
    }
    if (prompts.length != sources) {
      throw new IllegalArgumentException(prompts.length + " prompts for " + sources + " sources");
    }
    requireIds(prompts);
    requireRectangle(prompts);
    clear();
    batch = prompts.length;
    return advance(prompts);
  }

  /**
   * Continues each sequence with its new tokens.
   *
   * @return the last logits of each sequence
   */
  public float[][] step(int[][] tokens) throws OrtException {
    if (length == 0) {
      throw new IllegalStateException("begin with prefill()");
    }
    requireIds(tokens);
    requireRectangle(tokens);
    if (tokens.length != batch) {
      throw new IllegalArgumentException("a step takes tokens for each of " + batch + " sequences");
    }
    return advance(tokens);
  }

  private static void requireIds(int[][] rows) {
    if (rows.length == 0 || Arrays.stream(rows).anyMatch(row -> row.length == 0)) {
      throw new IllegalArgumentException("each sequence needs at least one token");
    }
    IntStream ids = Arrays.stream(rows).flatMapToInt(Arrays::stream);
    if (ids.anyMatch(id -> id < 0 || id >= VOCABULARY)) {
      throw new IllegalArgumentException("token ids are 0 to " + (VOCABULARY - 1));
    }
  }

  private static void requireRectangle(int[][] rows) {
    if (Arrays.stream(rows).anyMatch(row -> row.length != rows[0].length)) {
      throw new IllegalArgumentException(
          "this model takes no padding: the rows of a batch must have the same length");
    }
  }

  private static void requireMask(int[][] mask, int rows, int columns) {
    if (mask == null) {
      return;
    }
    if (mask.length != rows || Arrays.stream(mask).anyMatch(row -> row.length != columns)) {
      int[] given = Arrays.stream(mask).mapToInt(row -> row.length).distinct().toArray();
      throw new IllegalArgumentException(
          String.format(
              "the mask of this source has the shape [%s, %s]; got %s rows of %s numbers",
              rows, columns, mask.length, Arrays.toString(given)));
    }
  }

  /** Runs one call on new tokens and keeps what it returns of the cache. */
  private float[][] advance(int[][] tokens) throws OrtException {
    int newTokens = tokens[0].length;
    if (length + newTokens > limit()) {
      throw new IllegalArgumentException("a sequence has at most " + limit() + " tokens here");
    }
    boolean first = length == 0;
    if (first) {
      for (Slot slot : CACHE) {
        keep(slot, firstValue(slot));
      }
    }
    Map<String, OnnxTensor> outputs = call(tokens, first ? FIRST_OUTPUTS : OUTPUTS);
    try {
      for (Slot slot : CACHE) {
        OnnxTensor value = outputs.remove(first ? slot.made() : slot.present());
        if (value != null) {
          keep(slot, value);
        }
      }
      length += newTokens;
      return lastRows(outputs.get("logits"));
    } finally {
      outputs.values().forEach(OnnxTensor::close);
    }
  }

  /** Feeds the new tokens and the cache. */
  private Map<String, OnnxTensor> call(int[][] tokens, Set<String> outputs) throws OrtException {
    int newTokens = tokens[0].length;
    int past = length;
    int encoderLength = encoderLength();
    Map<String, OnnxTensor> inputs = new HashMap<>();
    inputs.put(
        "encoder_attention_mask",
        int64(i -> sourceMask(i, batch, encoderLength), batch, encoderLength));
    inputs.put("input_ids", int64(i -> tokens[i / newTokens][i % newTokens], batch, newTokens));
    inputs.put("use_cache_branch", bool(i -> past > 0, 1));
    Map<String, OnnxTensor> kept = new HashMap<>(cache);
    kept.put("encoder_hidden_states", encoded.get("last_hidden_state"));
    return run(DECODER, inputs, kept, outputs);
  }

  /** What the first call is fed: zeros that this branch of the graph does not read. */
  private OnnxTensor firstValue(Slot slot) throws OrtException {
    OnnxJavaType type = slot.layout().type();
    long[] shape = slot.layout().shape().clone();
    for (int axis = 0; axis < shape.length; axis++) {
      if (shape[axis] == BATCH) {
        shape[axis] = batch;
      } else if (shape[axis] < 0) {
        shape[axis] = 1;
      }
    }
    ByteBuffer zeros = ByteBuffer.allocateDirect(count(shape) * type.size);
    return OnnxTensor.createTensor(environment, zeros.order(ByteOrder.nativeOrder()), shape, type);
  }

  /** Makes a tensor the value of a slot, and closes what was there. */
  private void keep(Slot slot, OnnxTensor value) {
    OnnxTensor old = cache.put(slot.past(), value);
    if (old != null) {
      old.close();
    }
  }

  /** Forgets the last {@code count} tokens of every sequence. At least one token must stay. */
  public void rewind(int count) throws OrtException {
    int shortest = length;
    if (count < 0 || count >= shortest) {
      throw new IllegalArgumentException("cannot forget " + count + " of " + shortest + " tokens");
    }
    length -= count;
    for (Slot slot : CACHE) {
      int axis = slot.layout().lengthAxis();
      if (slot.layout().shape()[axis] == PAST) {
        OnnxTensor value = cache.get(slot.past());
        Entries all = Entries.of(value, value.getByteBuffer(), axis);
        keep(slot, join(value, axis, List.of(all.part(0, length))));
      }
    }
  }

  /** Makes row i of the batch a copy of what row {@code rows[i]} was, as a beam search needs it. */
  public void reorder(int[] rows) throws OrtException {
    if (length == 0 || rows.length == 0) {
      throw new IllegalArgumentException("there are no rows to take");
    }
    for (int row : rows) {
      Objects.checkIndex(row, batch);
    }
    for (Slot slot : CACHE) {
      int axis = slot.layout().batchAxis();
      keep(slot, take(cache.get(slot.past()), axis, rows));
    }
    OnnxTensor states = encoded.get("last_hidden_state");
    encoded.put("last_hidden_state", take(states, 0, rows));
    states.close();
    moved = true;
    if (sourceMask != null) {
      sourceMask = IntStream.of(rows).mapToObj(row -> sourceMask[row]).toArray(int[][]::new);
    }
    batch = rows.length;
  }

  private OnnxTensor take(OnnxTensor tensor, int axis, int[] rows) throws OrtException {
    Entries all = Entries.of(tensor, tensor.getByteBuffer(), axis);
    List<Entries> parts = new ArrayList<>();
    for (int row : rows) {
      parts.add(all.part(row, row + 1));
    }
    return join(tensor, axis, parts);
  }

  /** Decodes greedily until every sequence has {@code most} new tokens. */
  public List<List<Integer>> generate(int[][] prompts, int most) throws OrtException {
    return generate(prompts, most, Set.of(), Decoder::likeliest, (row, token) -> {});
  }

  /**
   * Decodes until every sequence has ended.
   *
   * @param prompts what each sequence begins with
   * @param most the most new tokens; none are made beyond {@link #limit}
   * @param stop tokens that end a sequence
   * @param choose picks a token of the logits of one sequence
   * @param onToken called for each new token
   * @return the new tokens of each sequence, the stop token not among them
   */
  public List<List<Integer>> generate(
      int[][] prompts,
      int most,
      Set<Integer> stop,
      ToIntFunction<float[]> choose,
      TokenListener onToken)
      throws OrtException {
    if (most < 1) {
      throw new IllegalArgumentException("most is 1 or more");
    }
    List<List<Integer>> made = new ArrayList<>();
    for (int row = 0; row < prompts.length; row++) {
      made.add(new ArrayList<>());
    }
    boolean[] ended = new boolean[prompts.length];
    float[][] logits = prefill(prompts);
    for (int count = 1; ; count++) {
      int[][] chosen = new int[prompts.length][1];
      int running = 0;
      for (int row = 0; row < prompts.length; row++) {
        int token = choose.applyAsInt(logits[row]);
        chosen[row][0] = token;
        ended[row] |= stop.contains(token);
        if (!ended[row]) {
          running++;
          made.get(row).add(token);
          onToken.accept(row, token);
        }
      }
      if (running == 0 || count >= most || length >= limit()) {
        return made;
      }
      logits = step(chosen);
    }
  }

  /** The token with the highest logit, the first of several. */
  public static int likeliest(float[] logits) {
    int best = 0;
    for (int token = 1; token < logits.length; token++) {
      if (logits[token] > logits[best]) {
        best = token;
      }
    }
    return best;
  }

  /** The last row of each sequence's logits. */
  private float[][] lastRows(OnnxTensor logits) {
    long[] shape = logits.getInfo().getShape();
    FloatBuffer values = logits.getFloatBuffer();
    // Only logits of rank 3 have a row for each new token.
    int vocabulary = shape.length == 3 ? (int) shape[2] : values.capacity() / batch;
    int rows = values.capacity() / vocabulary / batch;
    float[][] last = new float[batch][vocabulary];
    for (int row = 0; row < batch; row++) {
      values.position(((row + 1) * rows - 1) * vocabulary);
      values.get(last[row]);
    }
    return last;
  }

  private int encoderLength() {
    return (int) encoded.get("last_hidden_state").getInfo().getShape()[1];
  }

  /** The mask of the source; a mask of another size belongs to the encoder's input alone. */
  private int sourceMask(int i, int rows, int columns) {
    boolean fits =
        sourceMask != null && sourceMask.length == rows && sourceMask[0].length == columns;
    return fits ? sourceMask[i / columns][i % columns] : 1;
  }

  /**
   * Runs one call.
   *
   * @param inputs made for this call; they are closed
   * @param kept fed as well; they stay open
   * @param names of the outputs
   * @return the outputs, which the caller owns
   */
  private Map<String, OnnxTensor> run(
      String file, Map<String, OnnxTensor> inputs, Map<String, OnnxTensor> kept, Set<String> names)
      throws OrtException {
    Map<String, OnnxTensor> feeds = new HashMap<>(kept);
    feeds.putAll(inputs);
    Map<String, OnnxTensor> outputs = new HashMap<>();
    String error = null;
    try {
      // The result stays open: closing it would close all tensors, and it holds nothing else.
      OrtSession.Result result = sessions.get(file).run(feeds, names);
      for (Map.Entry<String, OnnxValue> output : result) {
        outputs.put(output.getKey(), (OnnxTensor) output.getValue());
      }
      return outputs;
    } catch (OrtException failed) {
      error = failed.getMessage();
      throw failed;
    } finally {
      if (trace != null) {
        note(file, feeds, outputs, error);
      }
      inputs.values().forEach(OnnxTensor::close);
    }
  }

  /** A tensor whose element i is {@code value(i)}. */
  private OnnxTensor int64(IntToLongFunction value, long... shape) throws OrtException {
    long[] values = IntStream.range(0, count(shape)).mapToLong(value).toArray();
    return OnnxTensor.createTensor(environment, LongBuffer.wrap(values), shape);
  }

  /** A tensor whose element i is {@code value(i)}. */
  private OnnxTensor bool(IntPredicate value, long... shape) throws OrtException {
    ByteBuffer values = ByteBuffer.allocate(count(shape));
    IntStream.range(0, values.limit()).forEach(i -> values.put(i, (byte) (value.test(i) ? 1 : 0)));
    return OnnxTensor.createTensor(environment, values, shape, OnnxJavaType.BOOL);
  }

  /** The number of elements of a shape; a Java buffer has at most 2^31 - 1. */
  private static int count(long... shape) {
    return Math.toIntExact(LongStream.of(shape).reduce(1, Math::multiplyExact));
  }

  /** A tensor like another, with these entries along an axis. */
  private OnnxTensor join(OnnxTensor like, int axis, List<Entries> parts) throws OrtException {
    OnnxJavaType type = like.getInfo().type;
    long[] shape = like.getInfo().getShape();
    int outer = count(Arrays.copyOf(shape, axis));
    int size = count(Arrays.copyOfRange(shape, axis + 1, shape.length)) * type.size;
    shape[axis] = parts.stream().mapToInt(Entries::count).sum();
    ByteBuffer joined = ByteBuffer.allocateDirect(count(shape) * type.size);
    for (int i = 0; i < outer; i++) {
      for (Entries part : parts) {
        ByteBuffer bytes = part.bytes().duplicate();
        int from = (i * part.all() + part.from()) * size;
        bytes.limit(from + part.count() * size).position(from);
        joined.put(bytes);
      }
    }
    joined.rewind();
    return OnnxTensor.createTensor(environment, joined.order(ByteOrder.nativeOrder()), shape, type);
  }

  /** Says to {@link #trace} what a call was fed and returned. */
  private void note(
      String file, Map<String, OnnxTensor> fed, Map<String, OnnxTensor> got, String error) {
    trace.accept(
        String.format(
            "%s\"file\": %s, \"fed\": %s, \"got\": %s, \"error\": %s}",
            run == null ? "{" : "{\"run\": " + quoted(run) + ", ",
            quoted(file),
            described(fed),
            described(got),
            quoted(error)));
  }

  private static String described(Map<String, OnnxTensor> tensors) {
    StringJoiner all = new StringJoiner(", ", "{", "}");
    tensors.forEach(
        (name, tensor) -> {
          TensorInfo info = tensor.getInfo();
          all.add(
              String.format(
                  "%s: {\"dtype\": \"%s\", \"shape\": %s, \"%s\": %s}",
                  quoted(name),
                  info.type,
                  Arrays.toString(info.getShape()),
                  info.getNumElements() <= 64 ? "data" : "sample",
                  numbers(tensor)));
        });
    return all.toString();
  }

  /** All elements of a small tensor; of a larger one 64, the first and the last among them. */
  private static String numbers(OnnxTensor tensor) {
    long size = tensor.getInfo().getNumElements();
    if (size == 0) {
      return "[]";
    }
    OnnxJavaType type = tensor.getInfo().type;
    ByteBuffer bytes = tensor.getByteBuffer();
    return LongStream.range(0, Math.min(size, 64))
        .map(k -> size <= 64 ? k : k * (size - 1) / 63)
        .mapToObj(i -> number(bytes, type, (int) i * type.size))
        .collect(Collectors.joining(", ", "[", "]"));
  }

  private static String number(ByteBuffer bytes, OnnxJavaType type, int at) {
    return switch (type) {
      case BOOL -> Byte.toString(bytes.get(at));
      case FLOAT -> finite(bytes.getFloat(at));
      case INT64 -> Long.toString(bytes.getLong(at));
      default -> "null";
    };
  }

  /** JSON has no NaN and no infinity. */
  private static String finite(float number) {
    return Float.isFinite(number) ? Float.toString(number) : "null";
  }

  /** Takes lines for the end of a file. */
  static Consumer<String> appendTo(Path file) {
    return line -> {
      try {
        Files.write(file, List.of(line), StandardOpenOption.CREATE, StandardOpenOption.APPEND);
      } catch (IOException failed) {
        throw new UncheckedIOException("cannot write " + file, failed);
      }
    };
  }

  /** A JSON string in ASCII; null for null. */
  static String quoted(String text) {
    if (text == null) {
      return "null";
    }
    StringBuilder quoted = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      boolean plain = c >= ' ' && c <= '~' && c != '"' && c != '\\';
      quoted.append(plain ? String.valueOf(c) : String.format("\\u%04x", (int) c));
    }
    return quoted.append('"').toString();
  }

  /** Called for each new token. */
  @FunctionalInterface
  public interface TokenListener {
    void accept(int row, int token);
  }

  /**
   * One tensor of the cache.
   *
   * @param past the input that it is fed to
   * @param made the output that first fills it, of the first call
   * @param present the output of each later call; null where the first value is kept
   */
  private record Slot(String past, String made, String present, Layout layout) {}

  /**
   * What tensors of the cache have in common.
   *
   * @param type the element type
   * @param batchAxis the axis of the sequences
   * @param lengthAxis the axis of the tokens
   * @param shape the sizes
   */
  private record Layout(OnnxJavaType type, int batchAxis, int lengthAxis, long... shape) {}

  /** A range of a tensor's entries along an axis, as bytes: the element type does not matter. */
  private record Entries(ByteBuffer bytes, int all, int from, int to) {
    static Entries of(OnnxTensor tensor, ByteBuffer bytes, int axis) {
      int all = (int) tensor.getInfo().getShape()[axis];
      return new Entries(bytes, all, 0, all);
    }

    Entries part(int first, int end) {
      return new Entries(bytes, all, first, end);
    }

    int count() {
      return to - from;
    }
  }
}
