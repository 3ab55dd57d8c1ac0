package decodeloop;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import decodeloop.Contract.Call;
import decodeloop.Contract.Dim;
import decodeloop.Contract.Input;
import decodeloop.Contract.Slot;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Spliterators;
import java.util.concurrent.CancellationException;
import java.util.function.Consumer;
import java.util.function.IntToDoubleFunction;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

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
  private final Cache cache;
  private Source source;

  // The sequences.
  private int length;
  private int[] padding = {};
  private List<List<Integer>> history = List.of();
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
    if (contract.capacityIsChosen() && capacity < 1) {
      throw new IllegalArgumentException("the cache needs room for at least one token");
    }
    this.contract = contract;
    int limit = contract.contextLimit() == null ? 0 : contract.contextLimit();
    this.capacity = contract.capacityIsChosen() ? capacity : limit;
    cache = new Cache(contract, this.capacity);
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

  /** The tokens in the cache of each sequence, without padding; they change with the cache. */
  public List<List<Integer>> history() {
    return history.stream().map(Collections::unmodifiableList).toList();
  }

  /** The most tokens that a sequence may have, padding counted. */
  public int limit() {
    int most = capacity == 0 ? Integer.MAX_VALUE : capacity;
    return contract.contextLimit() == null ? most : Math.min(most, contract.contextLimit());
  }

  /**
   * Gives each later call to {@code lines}, as {@code kvdoctor step-test MODEL --trace} reads it.
   *
   * @param run what the lines belong to, or null
   * @param lines takes a line of JSON; null ends it
   */
  public void trace(String run, Consumer<String> lines) {
    sessions.trace(run, lines);
  }

  /** Ends the call that is running, or the next one; any thread may call it. */
  public void cancel() throws OrtException {
    sessions.cancel();
  }

  /** Begins anew: no sequences, and nothing encoded. */
  public void reset() {
    clear();
    if (source != null) {
      source.close();
    }
    source = null;
  }

  /** Forgets the sequences. */
  private void clear() {
    cache.clear();
    mask = null;
    length = 0;
    padding = new int[0];
    history = List.of();
  }

  /** Releases the cache and the models. */
  @Override
  public void close() throws OrtException {
    reset();
    sessions.close();
  }

  /**
   * Says what the sequences are about, in token ids: runs the encoder, where the model has one.
   *
   * @param mask 0 for padding on the right, else 1, for each id; null where all is read
   */
  public void encode(int[][] source, int[][] mask) throws OrtException {
    requireRectangle(source, "source");
    if (Arrays.stream(source).flatMapToInt(Arrays::stream).anyMatch(id -> id < 0)) {
      throw new IllegalArgumentException("the ids of the source are 0 or more");
    }
    int columns = source[0].length;
    encode(new long[] {source.length, columns}, mask, i -> source[i / columns][i % columns]);
  }

  /** Is {@link #encode(int[][], int[][])} for features of sound or a picture, or for states. */
  public void encode(float[] source, long[] shape, int[][] mask) throws OrtException {
    if (source.length == 0 || Tensors.count(shape) != source.length) {
      throw new IllegalArgumentException(
          "the source must fill its shape: " + source.length + " for " + Arrays.toString(shape));
    }
    encode(shape, mask, i -> source[i]);
  }

  private void encode(long[] shape, int[][] mask, IntToDoubleFunction at) throws OrtException {
    Input given = contract.source();
    if (given == null) {
      throw new IllegalArgumentException("this model takes no source");
    }
    List<Dim> dims = given.dims();
    boolean fits =
        shape.length == dims.size()
            && IntStream.range(0, shape.length)
                .allMatch(i -> dims.get(i).axis() != null || dims.get(i).size() == shape[i]);
    if (!fits) {
      throw new IllegalArgumentException(
          "the source has the shape " + dims + ", not " + Arrays.toString(shape));
    }
    if (mask != null) {
      requireMask(mask, shape[0], shape[axisOf(dims, "encoder_input", "encoder")]);
    }
    reset();
    source = new Source(Tensors.fill(given.dtype(), shape, at), mask, new HashMap<>());
    this.mask = mask;
    if (contract.calls().encode() == null) {
      return;
    }
    int batch = axisOf(dims, "batch");
    long rows = "batch".equals(dims.get(batch).axis()) ? shape[batch] : shape[0];
    try {
      Map<String, OnnxTensor> made = call(contract.calls().encode(), rows, new int[1][0], Map.of());
      source.encoded().putAll(made);
    } catch (OrtException | RuntimeException failed) {
      reset();
      throw failed;
    }
  }

  private void requireMask(int[][] mask, long rows, long columns) {
    if (contract.calls().all().noneMatch(call -> call.follows("encoder-mask"))) {
      throw new IllegalArgumentException("this model takes no mask of the source");
    }
    if (mask.length != rows || Arrays.stream(mask).anyMatch(row -> row.length != columns)) {
      throw new IllegalArgumentException(
          "the mask of this source has the shape [" + rows + ", " + columns + "]");
    }
  }

  /** The first axis that counts one of these; else the last one. */
  private static int axisOf(List<Dim> dims, String... counted) {
    for (String name : counted) {
      int axis = dims.indexOf(new Dim(-1, name));
      if (axis >= 0) {
        return axis;
      }
    }
    return dims.size() - 1;
  }

  /**
   * Begins sequences with their prompts. Shorter prompts are padded on the left where the contract
   * says so: the mask hides the padding, and positions do not count it.
   */
  public Logits prefill(int[][] prompts) throws OrtException {
    int longest = Arrays.stream(prompts).mapToInt(prompt -> prompt.length).max().orElse(0);
    int[][] tokens = prompts;
    if (contract.pads()) {
      tokens = new int[prompts.length][longest];
      for (int row = 0; row < prompts.length; row++) {
        int[] prompt = prompts[row];
        System.arraycopy(prompt, 0, tokens[row], longest - prompt.length, prompt.length);
      }
    }
    requireIds(prompts);
    requireRectangle(tokens, "prompts");
    requireBeginning(prompts.length);
    requireRoom(longest);
    clear();
    mask = source == null ? null : source.mask();
    padding = Arrays.stream(prompts).mapToInt(prompt -> longest - prompt.length).toArray();
    history = Arrays.stream(prompts).<List<Integer>>map(prompt -> new ArrayList<>()).toList();
    try {
      Logits logits = advanceAll(tokens);
      for (int row = 0; row < prompts.length; row++) {
        history.get(row).subList(0, padding[row]).clear();
      }
      return logits;
    } catch (OrtException | RuntimeException failed) {
      clear();
      throw failed;
    }
  }

  private void requireBeginning(int batch) {
    if (contract.batch() != null && batch != contract.batch()) {
      throw new IllegalArgumentException("the graph takes a batch of " + contract.batch());
    }
    if (contract.source() == null) {
      return;
    }
    if (source == null) {
      throw new IllegalStateException("begin with encode()");
    }
    int axis = contract.source().dims().indexOf(new Dim(-1, "batch"));
    if (axis >= 0 && source.given().getInfo().getShape()[axis] != batch) {
      throw new IllegalArgumentException(
          batch + " prompts for " + source.given().getInfo().getShape()[axis] + " sources");
    }
  }

  private void requireRoom(int total) {
    if (total > limit()) {
      throw new IllegalArgumentException("a sequence has at most " + limit() + " tokens here");
    }
  }

  /** Continues each sequence with its new tokens, as many for each. */
  public Logits step(int[][] tokens) throws OrtException {
    if (length == 0) {
      throw new IllegalStateException("begin with prefill()");
    }
    requireIds(tokens);
    requireRectangle(tokens, "tokens");
    if (tokens.length != padding.length || !contract.chunks() && tokens[0].length != 1) {
      String some = contract.chunks() ? "tokens" : "one token";
      throw new IllegalArgumentException(
          "a step takes " + some + " for each of " + padding.length + " sequences");
    }
    requireRoom(length + tokens[0].length);
    return advanceAll(tokens);
  }

  private void requireIds(int[][] rows) {
    int most = contract.vocabulary() == null ? Integer.MAX_VALUE : contract.vocabulary();
    for (int[] row : rows) {
      for (int id : row) {
        if (id < 0 || id >= most) {
          throw new IllegalArgumentException("token ids are 0 to " + (most - 1) + "; got " + id);
        }
        if (contract.placeholders() != null && contract.placeholders().contains(id)) {
          throw new IllegalArgumentException(
              "token " + id + " stands for an image or audio, which this program does not take");
        }
      }
      if (row.length == 0) {
        throw new IllegalArgumentException("each sequence needs at least one token");
      }
    }
  }

  private static void requireRectangle(int[][] rows, String what) {
    if (rows.length == 0 || rows[0].length == 0) {
      throw new IllegalArgumentException(what + ": there is nothing in it");
    }
    if (Arrays.stream(rows).anyMatch(row -> row.length != rows[0].length)) {
      throw new IllegalArgumentException(what + ": the rows must have the same length");
    }
  }

  /** Feeds tokens in as many calls as the graph needs. */
  private Logits advanceAll(int[][] tokens) throws OrtException {
    if (!contract.oneToken()) {
      return advance(tokens);
    }
    Logits all = null;
    for (int i = 0; i < tokens[0].length; i++) {
      int position = i;
      int[][] column =
          Arrays.stream(tokens).map(row -> new int[] {row[position]}).toArray(int[][]::new);
      Logits logits = advance(column);
      if (all == null) {
        all = logits;
      } else {
        all.add(logits);
      }
    }
    return all;
  }

  /** Runs one call on new tokens and takes what it returns of the cache. */
  private Logits advance(int[][] tokens) throws OrtException {
    boolean first = length == 0;
    if (first) {
      cache.begin(tokens.length, source);
    }
    Call call = first ? contract.calls().prefill() : contract.calls().decode();
    Map<String, OnnxTensor> embedded = Map.of();
    Map<String, OnnxTensor> outputs = new HashMap<>();
    try {
      if (call.follows("embeddings")) {
        embedded = call(contract.calls().embed(), tokens.length, tokens, Map.of());
      }
      outputs = call(call, tokens.length, tokens, embedded);
      Logits logits = new Logits(outputs.get(call.logits()), tokens.length, contract.vocabulary());
      cache.take(outputs, length);
      length += tokens[0].length;
      for (int row = 0; row < tokens.length; row++) {
        history.get(row).addAll(Arrays.stream(tokens[row]).boxed().toList());
      }
      return logits;
    } finally {
      outputs.values().forEach(OnnxTensor::close);
      embedded.values().forEach(OnnxTensor::close);
    }
  }

  /** Forgets the last {@code count} tokens of every sequence. At least one token must stay. */
  public void rewind(int count) throws OrtException {
    if (!contract.rewinds()) {
      throw new IllegalStateException("a part of the cache of this model cannot go back");
    }
    int shortest = length - Arrays.stream(padding).max().orElse(0);
    if (count < 0 || count >= shortest) {
      throw new IllegalArgumentException("cannot forget " + count + " of " + shortest + " tokens");
    }
    if (count > 0) {
      cache.cut(length - count);
    }
    length -= count;
    history.forEach(row -> row.subList(row.size() - count, row.size()).clear());
  }

  /** Makes sequence i a copy of what {@code rows[i]} was, as a beam search needs it. */
  public void reorder(int[] rows) throws OrtException {
    if (!contract.reorders()) {
      throw new IllegalStateException("the sequences of this model cannot change places");
    }
    if (length == 0 || rows.length == 0) {
      throw new IllegalArgumentException("there are no rows to take");
    }
    IntStream.of(rows).forEach(row -> Objects.checkIndex(row, padding.length));
    cache.reorder(rows);
    if (mask != null) {
      int[][] before = mask;
      mask = IntStream.of(rows).mapToObj(row -> before[row]).toArray(int[][]::new);
    }
    int[] before = padding;
    padding = IntStream.of(rows).map(row -> before[row]).toArray();
    List<List<Integer>> were = history;
    history =
        IntStream.of(rows).<List<Integer>>mapToObj(row -> new ArrayList<>(were.get(row))).toList();
  }

  /** Decodes until every sequence has ended; the new tokens of each. */
  public List<List<Integer>> generate(int[][] prompts, Generation how) throws OrtException {
    List<List<Integer>> made = new ArrayList<>();
    for (int row = 0; row < prompts.length; row++) {
      made.add(new ArrayList<>());
    }
    TokenIterator tokens = new TokenIterator(this, prompts, how);
    for (Token token = tokens.advance(); token != null; token = tokens.advance()) {
      made.get(token.sequence()).add(token.id());
    }
    return made;
  }

  /**
   * Decodes one token after another, those of all sequences in turn; each is decoded when it is
   * asked for. In place of an {@link OrtException} they throw an {@link IllegalStateException} with
   * that cause. A caller that stops earlier has nothing to close.
   */
  public Stream<Token> tokens(int[][] prompts, Generation how) {
    TokenIterator tokens = new TokenIterator(this, prompts, how);
    return StreamSupport.stream(Spliterators.spliteratorUnknownSize(tokens, 0), false);
  }

  private Map<String, Long> sizes(long batch, int count) {
    Map<String, Long> sizes = new HashMap<>();
    sizes.put("batch", batch);
    sizes.put("new", (long) count);
    sizes.put("past", (long) length);
    sizes.put("total", (long) length + count);
    sizes.put("capacity", (long) capacity);
    if (source != null) {
      int axis = axisOf(contract.source().dims(), "encoder_input", "encoder");
      long input = source.given().getInfo().getShape()[axis];
      sizes.put("encoder_input", input);
      sizes.put("encoder", encoderLength(input));
    }
    return sizes;
  }

  /** The number of encoder states; before they are there, that of the encoder's input. */
  private long encoderLength(long input) {
    boolean given = contract.source().rule().equals("encoder-states");
    OnnxTensor states = cache.states();
    if (states != null && (contract.calls().encode() != null || given)) {
      return states.getInfo().getShape()[1];
    }
    for (Slot slot : contract.slots()) {
      OnnxTensor value = cache.get(slot.past());
      boolean made = value != null && (length > 0 || slot.byEncoder());
      if (made && slot.countsStates() && slot.lengthAxis() != null) {
        return value.getInfo().getShape()[slot.lengthAxis()];
      }
    }
    return input;
  }

  /** Runs one call; the caller owns the outputs. */
  private Map<String, OnnxTensor> call(
      Call call, long batch, int[][] tokens, Map<String, OnnxTensor> embedded) throws OrtException {
    Inputs inputs = new Inputs(sizes(batch, tokens[0].length), tokens, padding, mask);
    Map<String, OnnxTensor> fed = new HashMap<>();
    List<OnnxTensor> made = new ArrayList<>(); // the others belong to the decoder
    try {
      for (Input one : call.inputs()) {
        OnnxTensor value;
        switch (one.rule()) {
          case "embeddings" -> value = embedded.get(one.made());
          case "encoder-states" -> value = cache.states();
          case "encoder-input" ->
              value = contract.calls().encode() == null ? cache.states() : source.given();
          default -> {
            long[] shape = inputs.shape(one);
            value = Tensors.fill(one.dtype(), shape, inputs.element(one, shape));
            made.add(value);
          }
        }
        fed.put(one.name(), value);
      }
      call.pasts().forEach(past -> fed.put(past, cache.get(past)));
      return sessions.run(call, fed);
    } finally {
      made.forEach(OnnxTensor::close);
    }
  }
}
