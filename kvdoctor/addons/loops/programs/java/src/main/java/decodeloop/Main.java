package decodeloop;

import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.function.Consumer;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/** Decodes from the command line: token ids in, token ids out. */
public final class Main {
  private static final String USAGE =
      """
      Token ids in, token ids out: a line for each sequence.

        --model FOLDER       folder of the model files
        --contract FILE      contract.json of the model (the one next to the program)
        --prompt IDS         ids with commas; once a sequence
        --source IDS         ids for the encoder, once a sequence; or the file of its input:
                             float32, little endian
        --source-shape SIZES the shape of the file, with commas
        --most N             the most new tokens (20)
        --stop IDS           ids that end a sequence, in place of those of the contract
        --follow IDS         continue with these ids whatever is likeliest; once a sequence
        --self-test WHAT     with --follow: then also rewind,reorder, and compare
        --temperature T      0 takes the likeliest token, otherwise sampled (0)
        --top-k N            sample from so many tokens; 0 is all (50)
        --top-p P            sample from the likeliest tokens of this probability together
        --min-p P            sample from tokens of this part of the largest probability
        --repetition-penalty P  of tokens that are there (1)
        --seed N             of the sampling (0)
        --capacity N         room of the cache in tokens, where it can be chosen (512)
        --threads N          of the sessions; 0 lets the runtime choose (0)
        --provider NAME      where the graphs run: cpu, cuda, coreml, nnapi, ... (cpu)
        --record FILE        write the calls into this file; without --prompt those of --runs
        --runs FILE          runs to play and compare (vectors.json next to the program)
      """;

  /** All options that the usage lists. */
  private static final Set<String> OPTIONS =
      USAGE
          .lines()
          .map(String::strip)
          .filter(line -> line.startsWith("--"))
          .map(line -> line.split(" ")[0])
          .collect(Collectors.toSet());

  private Main() {}

  public static void main(String[] args) {
    List<String> words = List.of(args);
    if (words.contains("--help")) {
      System.out.print(USAGE);
      return;
    }
    try {
      if (!run(new Arguments(words, OPTIONS))) {
        System.exit(1);
      }
    } catch (OrtException | IOException | RuntimeException failed) {
      // Of a file that is not there, the message is its name alone.
      boolean named = failed.getMessage() == null || failed instanceof IOException;
      System.err.println("error: " + (named ? failed.toString() : failed.getMessage()));
      System.exit(1);
    }
  }

  /** Returns whether all runs gave the expected tokens; decoding is always right. */
  private static boolean run(Arguments given) throws OrtException, IOException {
    boolean plays = given.has("--runs") || given.has("--record") && !given.has("--prompt");
    if (plays && given.has("--prompt")) {
      throw new IllegalArgumentException("--runs takes its prompts from the file");
    }
    Path folder = Path.of(given.one("--model"));
    Contract contract = Contract.read(found(given.one("--contract", null), "contract.json"));
    int capacity = given.number("--capacity", 512, Integer::valueOf);
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      options.setIntraOpNumThreads(given.number("--threads", 0, Integer::valueOf));
      Providers.add(options, given.one("--provider", "cpu"));
      try (Decoder decoder = new Decoder(folder, contract, options, capacity)) {
        Path runs = plays ? found(given.one("--runs", null), "vectors.json") : null;
        Consumer<String> record = recordTo(given.one("--record", null), runs);
        if (plays) {
          return Run.play(decoder, runs, record, System.out::println);
        }
        if (given.has("--record")) {
          decoder.trace(null, record);
        }
        decode(decoder, given);
        return true;
      }
    }
  }

  /** A given path, or that of a file next to the program, above it, or in the current folder. */
  private static Path found(String given, String name) {
    if (given != null) {
      return Path.of(given);
    }
    try {
      Path jar = Path.of(Main.class.getProtectionDomain().getCodeSource().getLocation().toURI());
      Path above = jar.resolve("../..").normalize();
      return Stream.of(jar.resolveSibling(name), above.resolve(name))
          .filter(Files::exists)
          .findFirst()
          .orElse(Path.of(name));
    } catch (URISyntaxException failed) {
      return Path.of(name);
    }
  }

  /** Takes lines for a file, which is emptied first; without one for nothing. */
  private static Consumer<String> recordTo(String file, Path runs) throws IOException {
    if (file == null) {
      return line -> {};
    }
    Path record = Path.of(file);
    if (runs != null && Files.exists(record) && Files.isSameFile(record, runs)) {
      throw new IllegalArgumentException("--record is the file of --runs itself");
    }
    Files.writeString(record, "");
    return line -> {
      try {
        Files.write(record, List.of(line), StandardOpenOption.APPEND);
      } catch (IOException failed) {
        throw new UncheckedIOException("cannot write " + record, failed);
      }
    };
  }

  private static void decode(Decoder decoder, Arguments given) throws OrtException, IOException {
    Run run = Run.of(given);
    Generation how = Generation.most(given.number("--most", 20, Integer::valueOf));
    if (given.has("--stop")) {
      how = how.stopAt(IntStream.of(given.rows("--stop")[0]).boxed().collect(Collectors.toSet()));
    }
    how =
        how.choose(
            new Sampling(
                given.number("--temperature", 0.0, Double::valueOf),
                given.number("--top-k", 50, Integer::valueOf),
                given.number("--top-p", 0.0, Double::valueOf),
                given.number("--min-p", 0.0, Double::valueOf),
                given.number("--repetition-penalty", 1.0, Double::valueOf),
                given.number("--seed", 0L, Long::valueOf)));
    List<Long> times = new ArrayList<>();
    long began = System.nanoTime();
    run.encode(decoder, Path.of(""));
    List<List<Integer>> made;
    if (given.has("--follow")) {
      made = run.decode(decoder, () -> times.add(System.nanoTime()));
    } else {
      made = new ArrayList<>();
      for (int row = 0; row < run.prompts().length; row++) {
        made.add(new ArrayList<>());
      }
      decoder
          .tokens(run.prompts(), how)
          .forEach(
              token -> {
                times.add(System.nanoTime());
                made.get(token.sequence()).add(token.id());
              });
    }
    for (List<Integer> row : made) {
      System.out.println(row.stream().map(String::valueOf).collect(Collectors.joining(",")));
    }
    if (!times.isEmpty()) {
      long last = times.get(times.size() - 1) - times.get(0);
      System.err.printf(
          Locale.ROOT,
          "first token %.1f ms, %.1f tokens/s%n",
          (times.get(0) - began) / 1e6,
          last > 0 ? (times.size() - 1) * 1e9 / last : 0);
    }
  }
}
