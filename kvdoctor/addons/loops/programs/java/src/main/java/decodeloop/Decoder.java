package decodeloop;

import static decodeloop.Contract.require;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import com.google.gson.JsonPrimitive;
import decodeloop.Contract.Call;
import decodeloop.Contract.Source;
import decodeloop.Tensors.Step;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.CancellationException;
import java.util.function.Consumer;
import java.util.function.IntToDoubleFunction;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * A model, and the cache of one batch of sequences. What the loop does is read from a
 * contract.json.
 *
 * <pre>{@code
 * Contract contract = Contract.read(Path.of("contract.json"));
 * try (Decoder decoder = Decoder.open(Path.of("path/to/the/model"), contract)) {
 *   List<List<Integer>> tokens = decoder.generate(new int[][] {{5, 6, 7}}, Generation.most(20));
 * }
 * }</pre>
 *
 * <p>A program may have several decoders, of one or of several models; each is for one thread at a
 * time. The cache goes from step to step as the runtime made it, but for the parts that the
 * contract has the loop put together. A tensor is closed as soon as the next one is there.
 *
 * <p>A call that fails leaves the sequences as they were, but for {@link #prefill} and {@link
 * #encode}: after these there are none. Where the thread is interrupted, or after {@link #cancel},
 * a call throws {@link CancellationException}.
 */
public final class Decoder implements AutoCloseable {
  private final Contract contract;
  private final int capacity;
  private final Sessions sessions;

  // The source and what the encoder made of it: every prefill begins with these.
  private final Cache encoded = new Cache(null);
  private int[][] sourceMask;

  // The sequences; the mask of the source has their order.
  private final Cache cache = new Cache(encoded);
  private int length;
  private int[] padding = {};
  private int[][] mask;

  /** Opens the files of a model in a folder, on the CPU. */
  public static Decoder open(Path folder, Contract contract) throws OrtException {
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      return new Decoder(folder, contract, options, 512);
    }
  }

  /**
   * Opens the files of a model in a folder.
   *
   * @param options providers and threads of the sessions
   * @param capacity the room of the cache in tokens, where the contract lets it be chosen
   */
  public Decoder(Path folder, Contract contract, OrtSession.SessionOptions options, int capacity)
      throws OrtException {
    require(!contract.capacityIsChosen() || capacity > 0, "the cache needs room for a token");
    this.contract = contract;
    this.capacity = contract.capacityIsChosen() ? capacity : contract.contextLimit();
    sessions = new Sessions(folder, contract, options);
  }

  /** The contract of the model. */
  public Contract contract() {
    return contract;
  }

  /** The number of tokens in the cache, padding counted. */
  public int length() {
    return length;
  }

  /** The most tokens that a sequence may have, padding counted. */
  public int limit() {
    int longest = contract.longest();
    return contract.capacityIsChosen() ? Math.min(capacity, longest) : longest;
  }

  /**
   * Gives each later call to {@code lines}, a line of JSON, as {@code kvdoctor step-test MODEL
   * --trace} reads it; null ends it.
   */
  public void trace(Consumer<String> lines) {
    sessions.trace(lines);
  }

  /** Ends the call that is running, or the next one; any thread may call it. */
  public void cancel() throws OrtException {
    sessions.cancel();
  }

  /** Begins anew: no sequences, and nothing encoded. */
  public void reset() {
    sourceMask = null;
    clear();
    encoded.clear();
  }

  private void clear() {
    cache.clear();
    length = 0;
    padding = new int[0];
    mask = sourceMask;
  }

  /** Releases the cache and the models. */
  @Override
  public void close() throws OrtException {
    reset();
    sessions.close();
  }

  /**
   * Says what the sequences are about, in token ids: runs the encoder, where the model has one.
   * Shorter rows are padded on the right, and masked.
   */
  public void encode(int[][] source) throws OrtException {
    int longest = longest(source);
    int[][] ids = new int[source.length][longest];
    int[][] mask = new int[source.length][longest];
    for (int row = 0; row < source.length; row++) {
      System.arraycopy(source[row], 0, ids[row], 0, source[row].length);
      Arrays.fill(mask[row], 0, source[row].length, 1);
    }
    boolean known = Arrays.stream(ids).flatMapToInt(Arrays::stream).allMatch(id -> id >= 0);
    require(known && longest > 0, "the ids of the source are 0 or more, and there is one");
    boolean even = Arrays.stream(source).allMatch(row -> row.length == longest);
    long[] shape = {source.length, longest};
    encode(shape, even ? null : mask, i -> ids[i / longest][i % longest]);
  }

  private static int longest(int[][] rows) {
    return Arrays.stream(rows).mapToInt(row -> row.length).max().orElse(0);
  }

  /**
   * Is {@link #encode(int[][])} for features of sound or a picture, or for states.
   *
   * @param mask 0 for padding on the right, else 1; null where all of each row is read
   */
  public void encode(float[] source, long[] shape, int[][] mask) throws OrtException {
    boolean full = source.length > 0 && Tensors.count(shape) == source.length;
    require(full, "the source must fill its shape " + Arrays.toString(shape));
    encode(shape, mask, i -> source[i]);
  }

  private void encode(long[] shape, int[][] mask, IntToDoubleFunction at) throws OrtException {
    Source source = contract.source();
    require(source != null, "this model takes no source");
    List<JsonPrimitive> dims = source.dims();
    boolean fits =
        shape.length == dims.size()
            && IntStream.range(0, shape.length)
                .allMatch(i -> !dims.get(i).isNumber() || dims.get(i).getAsLong() == shape[i]);
    require(fits, "the source has the shape " + dims + ", not " + Arrays.toString(shape));
    long rows = source.batchAxis() == null ? 1 : shape[source.batchAxis()];
    long columns = shape[source.lengthAxis()];
    require(
        mask == null
            || mask.length == rows && Arrays.stream(mask).allMatch(row -> row.length == columns),
        "the mask of this source has the shape [" + rows + ", " + columns + "]");
    require(mask == null || source.masked(), "this model takes no mask of its source");
    reset();
    sourceMask = mask;
    this.mask = mask;
    try {
      encoded.put("source", Tensors.fill(source.dtype(), shape, at));
      run("encode", encoded, new int[(int) rows][0]);
    } catch (OrtException | RuntimeException failed) {
      reset();
      throw failed;
    }
  }

  /**
   * Begins sequences with their prompts. Shorter prompts are padded on the left where the contract
   * says so: the mask hides the padding, and positions do not count it.
   */
  public Logits prefill(int[][] prompts) throws OrtException {
    int longest = longest(prompts);
    int[][] tokens = prompts.clone();
    for (int row = 0; contract.pads() && row < prompts.length; row++) {
      int[] prompt = prompts[row];
      tokens[row] = new int[longest];
      System.arraycopy(prompt, 0, tokens[row], longest - prompt.length, prompt.length);
    }
    requireIds(prompts);
    requireRectangle(tokens, "prompts");
    boolean fits = contract.batch() == null || contract.batch() == prompts.length;
    require(fits, "the graph takes a batch of " + contract.batch());
    OnnxTensor source = encoded.get("source");
    require(contract.source() == null || source != null, "begin with encode()");
    if (source != null && contract.source().batchAxis() != null) {
      long sources = size(source, contract.source().batchAxis());
      require(sources == prompts.length, prompts.length + " prompts for " + sources + " sources");
    }
    int[] padded = Arrays.stream(prompts).mapToInt(prompt -> longest - prompt.length).toArray();
    requireRoom(longest, padded);
    clear();
    padding = padded;
    try {
      cache.begin(contract.zeros(), sizes(tokens));
      return advance(tokens);
    } catch (OrtException | RuntimeException failed) {
      clear();
      throw failed;
    }
  }

  /** Continues each sequence with its new tokens, as many for each. */
  public Logits step(int[][] tokens) throws OrtException {
    require(length > 0, "begin with prefill()");
    requireIds(tokens);
    requireRectangle(tokens, "tokens");
    String some = contract.chunks() ? "tokens" : "one token";
    boolean fits = tokens.length == padding.length && (contract.chunks() || tokens[0].length == 1);
    require(fits, "a step takes " + some + " for each of " + padding.length + " sequences");
    requireRoom(length + tokens[0].length, padding);
    return advance(tokens);
  }

  private void requireRoom(int total, int[] padding) {
    boolean padded =
        IntStream.of(padding).anyMatch(count -> count > 0); // which no ring has room for
    int most = padded ? Math.min(limit(), contract.contextLimit()) : limit();
    require(total <= most, "a sequence has at most " + most + " tokens here");
  }

  private void requireIds(int[][] rows) {
    int most = contract.vocabulary();
    for (int[] row : rows) {
      require(row.length > 0, "each sequence needs at least one token");
      for (int id : row) {
        boolean known = id >= 0 && id < most;
        require(known, "token ids are 0 to " + (most - 1) + "; got " + id);
        boolean text = !contract.placeholders().contains(id);
        require(text, "token " + id + " stands for an image or audio, which is not taken here");
      }
    }
  }

  private static void requireRectangle(int[][] rows, String what) {
    require(rows.length > 0 && rows[0].length > 0, what + ": there is nothing in it");
    boolean even = Arrays.stream(rows).allMatch(row -> row.length == rows[0].length);
    require(even, what + ": the rows must have the same length");
  }

  /** Forgets the last {@code count} tokens of every sequence. At least one token must stay. */
  public void rewind(int count) throws OrtException {
    // What a ring has written over is gone.
    boolean rewinds = contract.rewinds() && length <= contract.contextLimit();
    require(rewinds, "a part of the cache of this model cannot go back");
    int shortest = length - Arrays.stream(padding).max().orElse(0);
    boolean fits = 0 <= count && count < shortest;
    require(fits, "cannot forget " + count + " of " + shortest + " tokens");
    if (count > 0) {
      cache.cut(contract.cut(), length - count);
    }
    length -= count;
  }

  /** Makes sequence i a copy of what {@code rows[i]} was, as a beam search needs it. */
  public void reorder(int[] rows) throws OrtException {
    require(contract.reorders(), "the sequences of this model cannot change places");
    require(length > 0 && rows.length > 0, "there are no rows to take");
    IntStream.of(rows).forEach(row -> Objects.checkIndex(row, padding.length));
    cache.reorder(contract.rows(), rows);
    if (mask != null) {
      int[][] masks = mask;
      mask = IntStream.of(rows).mapToObj(row -> masks[row]).toArray(int[][]::new);
    }
    int[] before = padding;
    padding = IntStream.of(rows).map(row -> before[row]).toArray();
  }

  /** Decodes until every sequence has ended; the new tokens of each. */
  public List<List<Integer>> generate(int[][] prompts, Generation how) {
    List<List<Integer>> made = new ArrayList<>();
    Arrays.stream(prompts).forEach(prompt -> made.add(new ArrayList<>()));
    tokens(prompts, how).forEach(token -> made.get(token.sequence()).add(token.id()));
    return made;
  }

  /**
   * Decodes one token after another, those of all sequences in turn, as they are asked for. In
   * place of an {@link OrtException} they throw an {@link IllegalStateException} with that cause. A
   * caller that stops earlier has nothing to close.
   */
  public Stream<Token> tokens(int[][] prompts, Generation how) {
    Tokens tokens = new Tokens(this, prompts, how);
    return Stream.generate(tokens::next).takeWhile(step -> !step.isEmpty()).flatMap(List::stream);
  }

  /** A new token of a sequence. */
  public record Token(int sequence, int id) {}

  /** Runs the calls on new tokens; the logits of the last one. */
  private Logits advance(int[][] tokens) throws OrtException {
    int count = tokens[0].length;
    // In a ring that is full, one token is written over the oldest.
    boolean alone = contract.oneToken() || length + count > contract.contextLimit();
    int size = alone ? 1 : count;
    Logits logits = null;
    for (int i = 0; i < count; i += size) {
      int at = i;
      Stream<int[]> part = Arrays.stream(tokens).map(row -> Arrays.copyOfRange(row, at, at + size));
      logits = run(length == 0 ? "prefill" : "decode", cache, part.toArray(int[][]::new));
      length += size;
    }
    return logits;
  }

  /** Runs the calls of a phase and takes what they return; the logits of the last one, or null. */
  private Logits run(String phase, Cache values, int[][] tokens) throws OrtException {
    Map<String, int[][]> rows = new HashMap<>(Map.of("tokens", tokens));
    rows.put("mask", mask);
    Step step = new Step(sizes(tokens), rows, padding);
    Logits logits = null;
    for (Call call : contract.calls().get(phase)) {
      call.sizes()
          .forEach((name, of) -> step.sizes().put(name, size(values.get(of.value()), of.axis())));
      Map<String, OnnxTensor> outputs = call(call, values, step);
      try {
        String name = call.logits();
        logits = name == null ? null : new Logits(outputs.get(name), tokens.length);
        values.take(call.takes(), outputs, length);
      } finally {
        outputs.values().forEach(OnnxTensor::close);
      }
    }
    return logits;
  }

  private static long size(OnnxTensor value, int axis) {
    return value.getInfo().getShape()[axis];
  }

  /** What axes and sums count in a call. */
  private Map<String, Long> sizes(int[][] tokens) {
    Map<String, Long> sizes = new HashMap<>();
    sizes.put("one", 1L);
    sizes.put("batch", (long) tokens.length);
    sizes.put("batch_heads", (long) tokens.length * contract.heads());
    sizes.put("new", (long) tokens[0].length);
    sizes.put("past", (long) length);
    sizes.put("total", (long) length + tokens[0].length);
    sizes.put("capacity", (long) capacity);
    return sizes;
  }

  /** Runs one call; the caller owns the outputs. */
  private Map<String, OnnxTensor> call(Call call, Cache values, Step step) throws OrtException {
    Map<String, OnnxTensor> fed = new HashMap<>();
    List<OnnxTensor> made = new ArrayList<>(); // for this call alone
    try {
      call.values().forEach((input, value) -> fed.put(input, values.get(value)));
      for (Contract.Made one : call.made()) {
        made.add(Tensors.make(one, step));
        fed.put(one.name(), made.get(made.size() - 1));
      }
      return sessions.run(call, fed);
    } finally {
      made.forEach(OnnxTensor::close);
    }
  }
}
