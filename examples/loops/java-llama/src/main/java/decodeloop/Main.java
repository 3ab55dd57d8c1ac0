package decodeloop;

import ai.onnxruntime.OrtException;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.PriorityQueue;
import java.util.Random;
import java.util.Set;
import java.util.function.Function;
import java.util.function.ToIntFunction;
import java.util.stream.Collectors;
import java.util.stream.DoubleStream;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/** Decodes from the command line: token ids in, token ids out. */
public final class Main {
  private static final String USAGE =
      """
      Token ids in, token ids out: a line for each sequence.

        --model FOLDER       folder of the model files
        --prompt IDS         ids with commas; once a sequence
        --most N             the most new tokens (20)
        --stop IDS           ids that end a sequence
        --follow IDS         continue with these ids whatever is likeliest; once a sequence
        --temperature T      0 takes the likeliest token, otherwise sampled (0)
        --top-k N            sample from so many tokens (50)
        --seed N             of the sampling (0)
        --self-test WHAT     with --follow: also rewind,reorder, and compare
      """;

  private static final Set<String> OPTIONS =
      Set.of(
          "--model",
          "--prompt",
          "--most",
          "--stop",
          "--follow",
          "--temperature",
          "--top-k",
          "--seed",
          "--self-test");

  private final Map<String, List<String>> options;
  private final List<Long> times = new ArrayList<>();

  private Main(Map<String, List<String>> options) {
    this.options = options;
  }

  public static void main(String[] args) {
    if (List.of(args).contains("--help")) {
      System.out.print(USAGE);
      return;
    }
    try {
      new Main(parsed(args)).decode();
    } catch (OrtException
        | IOException
        | UncheckedIOException
        | IllegalArgumentException
        | IllegalStateException failed) {
      System.err.println("error: " + failed.getMessage());
      System.exit(1);
    }
  }

  private void decode() throws OrtException, IOException {
    int[][] prompts = rows("--prompt");
    try (Decoder decoder = Decoder.open(Path.of(one("--model", null)))) {
      long began = System.nanoTime();
      for (List<Integer> row : made(decoder, prompts)) {
        System.out.println(row.stream().map(String::valueOf).collect(Collectors.joining(",")));
      }
      if (!times.isEmpty()) {
        long first = times.get(0);
        long last = times.get(times.size() - 1);
        double rate = last > first ? (times.size() - 1) * 1e9 / (last - first) : 0;
        System.err.printf(
            "first token %.1f ms, %.1f tokens/s, peak memory %d MiB%n",
            (first - began) / 1e6, rate, peakMib());
      }
    }
  }

  private List<List<Integer>> made(Decoder decoder, int[][] prompts) throws OrtException {
    if (options.containsKey("--follow")) {
      return follow(decoder, prompts, rows("--follow"));
    }
    double temperature = number("--temperature", "0", Double::valueOf);
    int topK = number("--top-k", "50", Integer::valueOf);
    long seed = number("--seed", "0", Long::valueOf);
    ToIntFunction<float[]> choose =
        temperature > 0 ? sampler(temperature, topK, seed) : Decoder::likeliest;
    Set<Integer> stop =
        IntStream.of(ids("--stop", one("--stop", ""))).boxed().collect(Collectors.toSet());
    int most = number("--most", "20", Integer::valueOf);
    return decoder.generate(
        prompts, most, stop, choose, (row, token) -> times.add(System.nanoTime()));
  }

  /** The likeliest token after the prompt and after each given one, whatever was likeliest. */
  private List<List<Integer>> follow(Decoder decoder, int[][] prompts, int[][] given)
      throws OrtException {
    if (given.length != prompts.length
        || given[0].length == 0
        || Arrays.stream(given).anyMatch(row -> row.length != given[0].length)) {
      throw new IllegalArgumentException("--follow: the same number of ids for each --prompt");
    }
    List<List<Integer>> made = new ArrayList<>();
    for (float[] row : decoder.prefill(prompts)) {
      made.add(new ArrayList<>(List.of(Decoder.likeliest(row))));
    }
    times.add(System.nanoTime());
    for (int i = 0; i < given[0].length; i++) {
      float[][] logits = decoder.step(column(given, i));
      times.add(System.nanoTime());
      for (int row = 0; row < given.length; row++) {
        made.get(row).add(Decoder.likeliest(logits[row]));
      }
    }
    selfTest(decoder, given, made);
    return made;
  }

  private static int[][] column(int[][] rows, int column) {
    return Arrays.stream(rows).map(row -> new int[] {row[column]}).toArray(int[][]::new);
  }

  /** Takes the last step again after going back, and after changing rows. */
  private void selfTest(Decoder decoder, int[][] given, List<List<Integer>> made)
      throws OrtException {
    List<String> wanted = List.of(one("--self-test", "").split(","));
    int[][] last = column(given, given[0].length - 1);
    int[] expected = made.stream().mapToInt(row -> row.get(row.size() - 1)).toArray();
    if (wanted.contains("rewind")) {
      decoder.rewind(1);
      compare("rewind", decoder.step(last), expected);
    }
    if (wanted.contains("reorder")) {
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

  private static void compare(String name, float[][] logits, int[] expected) {
    int[] got = Arrays.stream(logits).mapToInt(Decoder::likeliest).toArray();
    if (!Arrays.equals(got, expected)) {
      throw new IllegalStateException(
          name + ": " + Arrays.toString(got) + " in place of " + Arrays.toString(expected));
    }
  }

  /** Picks from the likeliest tokens, by their probabilities at a temperature. */
  private static ToIntFunction<float[]> sampler(double temperature, int topK, long seed) {
    if (topK < 1) {
      throw new IllegalArgumentException("--top-k: at least 1 is needed");
    }
    Random random = new Random(seed);
    return logits -> {
      PriorityQueue<Integer> likeliest =
          new PriorityQueue<>(Comparator.comparing((Integer token) -> logits[token]));
      for (int token = 0; token < logits.length; token++) {
        if (likeliest.size() < topK || logits[token] > logits[likeliest.element()]) {
          likeliest.add(token);
        }
        if (likeliest.size() > topK) {
          likeliest.remove();
        }
      }
      int[] tokens = likeliest.stream().mapToInt(Integer::intValue).toArray();
      double top = logits[Decoder.likeliest(logits)];
      double[] weights =
          IntStream.of(tokens)
              .mapToDouble(token -> Math.exp((logits[token] - top) / temperature))
              .toArray();
      double left = random.nextDouble() * DoubleStream.of(weights).sum();
      int chosen = 0;
      while (chosen < tokens.length - 1 && left >= weights[chosen]) {
        left -= weights[chosen++];
      }
      return tokens[chosen];
    };
  }

  private static Map<String, List<String>> parsed(String[] args) {
    Map<String, List<String>> options = new HashMap<>();
    for (int i = 0; i < args.length; i += 2) {
      if (!OPTIONS.contains(args[i])) {
        throw new IllegalArgumentException("unknown option " + args[i] + "; see --help");
      }
      if (i + 1 == args.length) {
        throw new IllegalArgumentException(args[i] + " needs a value");
      }
      options.computeIfAbsent(args[i], name -> new ArrayList<>()).add(args[i + 1]);
    }
    return options;
  }

  /** The last value of an option; one without a default must be given. */
  private String one(String name, String otherwise) {
    List<String> values = options.get(name);
    if (values == null && otherwise == null) {
      throw new IllegalArgumentException(name + " is missing; see --help");
    }
    return values == null ? otherwise : values.get(values.size() - 1);
  }

  private <T> T number(String name, String otherwise, Function<String, T> parse) {
    String text = one(name, otherwise);
    try {
      return parse.apply(text);
    } catch (NumberFormatException failed) {
      throw new IllegalArgumentException(name + ": " + text + " is no number", failed);
    }
  }

  /** The ids of an option that is given once a sequence. */
  private int[][] rows(String name) {
    one(name, null);
    return options.get(name).stream().map(text -> ids(name, text)).toArray(int[][]::new);
  }

  /** Integers with commas between them. */
  private static int[] ids(String name, String text) {
    try {
      return Stream.of(text.split(","))
          .filter(id -> !id.isBlank())
          .mapToInt(id -> Integer.parseInt(id.strip()))
          .toArray();
    } catch (NumberFormatException failed) {
      throw new IllegalArgumentException(name + ": " + text + " is no list of ids", failed);
    }
  }

  /** The largest resident memory of this process so far; 0 where the system does not tell. */
  private static long peakMib() throws IOException {
    Path status = Path.of("/proc/self/status");
    if (!Files.exists(status)) {
      return 0;
    }
    try (Stream<String> lines = Files.lines(status)) {
      return lines
          .filter(line -> line.startsWith("VmHWM:"))
          .mapToLong(line -> Long.parseLong(line.replaceAll("\\D", "")) / 1024)
          .findFirst()
          .orElse(0);
    }
  }
}
