package decodeloop;

import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Locale;
import java.util.PriorityQueue;
import java.util.Random;
import java.util.Set;
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
        --provider NAME      where the graphs run: cpu, cuda, coreml, nnapi, ... (cpu)

      Or decode the runs of a probe file, and write down all calls:

        --probe FILE         the arguments of a run on each line
        --result FILE        the file to write (result.jsonl)
      """;

  private static final Set<String> MODEL_OPTIONS = Set.of("--model", "--provider");
  private static final Set<String> PROBE_OPTIONS = Set.of("--probe", "--result");
  private static final Set<String> DECODE_OPTIONS =
      Set.of("--most", "--stop", "--temperature", "--top-k", "--seed");

  private Main() {}

  public static void main(String[] args) {
    List<String> words = List.of(args);
    if (words.contains("--help")) {
      System.out.print(USAGE);
      return;
    }
    try {
      if (!run(words)) {
        System.exit(1);
      }
    } catch (OrtException | IOException | RuntimeException failed) {
      // Of a file that is not there, the message is its name alone.
      boolean named = failed.getMessage() == null || failed instanceof IOException;
      System.err.println("error: " + (named ? failed.toString() : failed.getMessage()));
      System.exit(1);
    }
  }

  /** Returns whether a probe showed the expected tokens; decoding is always right. */
  private static boolean run(List<String> words) throws OrtException, IOException {
    boolean probes = words.contains("--probe");
    Arguments given =
        new Arguments(
            words,
            name ->
                MODEL_OPTIONS.contains(name)
                    || (probes
                        ? PROBE_OPTIONS.contains(name)
                        : DECODE_OPTIONS.contains(name) || Run.OPTIONS.contains(name)));
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      Providers.add(options, given.one("--provider", "cpu"));
      Path folder = Path.of(given.one("--model"));
      try (Decoder decoder = new Decoder(folder, options)) {
        if (probes) {
          return probe(decoder, given);
        }
        decode(decoder, given);
        return true;
      }
    }
  }

  private static boolean probe(Decoder decoder, Arguments given) throws IOException {
    Path file = Path.of(given.one("--probe"));
    Path result = Path.of(given.one("--result", "result.jsonl"));
    List<String> lines = Files.readAllLines(file);
    if (Files.exists(result) && Files.isSameFile(file, result)) {
      throw new IllegalArgumentException("--result is the file of --probe itself");
    }
    Files.writeString(result, "");
    return new Probe(decoder, Decoder.appendTo(result), System.out::println).run(lines);
  }

  private static void decode(Decoder decoder, Arguments given) throws OrtException, IOException {
    double temperature = given.number("--temperature", 0.0, Double::valueOf);
    int topK = given.number("--top-k", 50, Integer::valueOf);
    long seed = given.number("--seed", 0L, Long::valueOf);
    int most = given.number("--most", 20, Integer::valueOf);
    if (topK < 1 || !(temperature >= 0)) {
      throw new IllegalArgumentException("--top-k is 1 or more, --temperature 0 or more");
    }
    Run run = new Run(given);
    List<Long> times = new ArrayList<>();
    long began = System.nanoTime();
    List<List<Integer>> made;
    if (given.has("--follow") || given.has("--self-test")) {
      made = run.follow(decoder, () -> times.add(System.nanoTime()));
    } else {
      Set<Integer> stop = IntStream.of(given.ids("--stop")).boxed().collect(Collectors.toSet());
      ToIntFunction<float[]> choose =
          temperature > 0 ? sampler(temperature, topK, seed) : Decoder::likeliest;
      made =
          decoder.generate(
              run.prompts(), most, stop, choose, (row, token) -> times.add(System.nanoTime()));
    }
    for (List<Integer> row : made) {
      System.out.println(row.stream().map(String::valueOf).collect(Collectors.joining(",")));
    }
    if (!times.isEmpty()) {
      long first = times.get(0);
      long last = times.get(times.size() - 1);
      double rate = last > first ? (times.size() - 1) * 1e9 / (last - first) : 0;
      System.err.printf(
          Locale.ROOT,
          "first token %.1f ms, %.1f tokens/s%s%n",
          (first - began) / 1e6,
          rate,
          peakMemory());
    }
  }

  /** Picks from the likeliest tokens, by their probabilities at a temperature. */
  private static ToIntFunction<float[]> sampler(double temperature, int topK, long seed) {
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

  /** ", peak memory N MiB", the largest resident memory so far; empty where it is unknown. */
  private static String peakMemory() throws IOException {
    Path status = Path.of("/proc/self/status");
    if (!Files.exists(status)) {
      return "";
    }
    try (Stream<String> lines = Files.lines(status)) {
      return lines
          .filter(line -> line.startsWith("VmHWM:"))
          .map(line -> Long.parseLong(line.replaceAll("\\D", "")) / 1024)
          .map(mib -> ", peak memory " + mib + " MiB")
          .findFirst()
          .orElse("");
    }
  }
}
