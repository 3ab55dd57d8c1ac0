package decodeloop;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtEpDevice;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/** Decodes from the command line: token ids in, token ids out. */
public final class Main {
  private static final String USAGE =
      """
      Token ids in, token ids out: a line for each sequence.

        --model FOLDER       folder of the model files
        --contract FILE      contract.json of the model (that of the current folder)
        --prompt IDS         ids with commas; once a sequence
        --source IDS         ids for the encoder, once a sequence; or the file of its input:
                             float32, little endian
        --source-shape SIZES the shape of the file, with commas
        --most N             the most new tokens (20)
        --stop IDS           ids that end a sequence, in place of those of the contract
        --temperature T      0 takes the likeliest token, otherwise sampled (0)
        --top-k N            sample from so many tokens; 0 is all (50)
        --top-p P            sample from the likeliest tokens of this probability together
        --min-p P            sample from tokens of this part of the largest probability
        --repetition-penalty P  of tokens that are there (1)
        --seed N             of the sampling (0)
        --capacity N         room of the cache in tokens, where it can be chosen (512)
        --threads N          of the sessions; 0 lets the runtime choose (0)
        --provider NAME      execution provider of the runtime (CPUExecutionProvider)
        --record FILE        write the calls into this file; without --prompt those of --runs
        --runs FILE          runs to play and compare (vectors.json of the current folder)
      """;

  private final Map<String, List<String>> options = new HashMap<>();

  private Main(String[] args) {
    for (int i = 0; i < args.length; i += 2) {
      boolean known = args[i].startsWith("--") && USAGE.contains("  " + args[i] + " ");
      Contract.require(known, "unknown option " + args[i] + "; see --help");
      Contract.require(i + 1 < args.length, args[i] + " needs a value");
      options.computeIfAbsent(args[i], key -> new ArrayList<>()).add(args[i + 1]);
    }
  }

  public static void main(String[] args) {
    if (List.of(args).contains("--help")) {
      System.out.print(USAGE);
      return;
    }
    try {
      System.exit(new Main(args).run() ? 0 : 1);
    } catch (OrtException | IOException | RuntimeException failed) {
      // Of a file that is not there, the message is its name alone.
      boolean named = failed.getMessage() == null || failed instanceof IOException;
      System.err.println("error: " + (named ? failed.toString() : failed.getMessage()));
      System.exit(1);
    }
  }

  /** The last value of an option. */
  private String one(String name, String otherwise) {
    List<String> given = options.getOrDefault(name, List.of());
    return given.isEmpty() ? otherwise : given.get(given.size() - 1);
  }

  private double number(String name, String otherwise) {
    return Double.parseDouble(one(name, otherwise));
  }

  private int whole(String name, String otherwise) {
    return Integer.parseInt(one(name, otherwise));
  }

  /** The ids of an option that is given once a sequence. */
  private int[][] rows(String name) {
    return options.getOrDefault(name, List.of()).stream()
        .map(text -> Stream.of(text.split(",")).filter(id -> !id.isBlank()))
        .map(ids -> ids.mapToInt(id -> Integer.parseInt(id.trim())).toArray())
        .toArray(int[][]::new);
  }

  /** Returns whether all runs gave the expected tokens; decoding is always right. */
  private boolean run() throws OrtException, IOException {
    Contract.require(options.containsKey("--model"), "--model is missing; see --help");
    Contract contract = Contract.read(Path.of(one("--contract", "contract.json")));
    try (OrtSession.SessionOptions session = new OrtSession.SessionOptions()) {
      session.setIntraOpNumThreads(whole("--threads", "0"));
      addProvider(session, one("--provider", "CPUExecutionProvider"));
      Path folder = Path.of(one("--model", ""));
      int capacity = whole("--capacity", "512");
      try (Decoder decoder = new Decoder(folder, contract, session, capacity)) {
        return options.containsKey("--record") ? record(decoder) : decode(decoder);
      }
    }
  }

  private static void addProvider(OrtSession.SessionOptions session, String name)
      throws OrtException {
    List<OrtEpDevice> devices = OrtEnvironment.getEnvironment().getEpDevices();
    List<OrtEpDevice> chosen =
        devices.stream().filter(one -> one.getEpName().equals(name)).limit(1).toList();
    String known = devices.stream().map(OrtEpDevice::getEpName).collect(Collectors.joining(", "));
    Contract.require(!chosen.isEmpty(), "there is no device for " + name + "; there is " + known);
    session.addExecutionProvider(chosen, Map.of());
  }

  /** Decodes the prompts, or without one plays the runs, and writes the calls down. */
  private boolean record(Decoder decoder) throws OrtException, IOException {
    Path vectors = Path.of(one("--runs", "vectors.json")).toAbsolutePath();
    Path file = Path.of(one("--record", "")).toAbsolutePath();
    boolean plays = !options.containsKey("--prompt");
    Contract.require(!file.equals(vectors), "--record is the file of --runs itself");
    String text = plays ? Files.readString(vectors) : "";
    Runs runs = plays ? Runs.read(text) : null;
    try (PrintStream lines = new PrintStream(Files.newOutputStream(file), true, "UTF-8")) {
      if (!plays) {
        decoder.trace(lines::println);
        return decode(decoder);
      }
      lines.println(text.strip().replace('\n', ' ')); // the runs that are due
      boolean right = runs.play(decoder, vectors.getParent(), lines::println, System.out::println);
      if (lines.checkError()) {
        throw new IOException("cannot write " + file);
      }
      return right;
    }
  }

  private boolean decode(Decoder decoder) throws OrtException, IOException {
    int[][] prompts = rows("--prompt");
    Contract.require(prompts.length > 0, "--prompt is missing; see --help");
    Generation how =
        Generation.most(whole("--most", "20"))
            .choose(
                new Sampling(
                        number("--temperature", "0"),
                        whole("--top-k", "50"),
                        number("--top-p", "0"),
                        number("--min-p", "0"),
                        number("--repetition-penalty", "1"),
                        Long.parseLong(one("--seed", "0")))
                    .choice());
    if (options.containsKey("--stop")) {
      how = how.stopAt(IntStream.of(rows("--stop")[0]).boxed().collect(Collectors.toSet()));
    }
    if (options.containsKey("--source-shape")) {
      long[] shape = IntStream.of(rows("--source-shape")[0]).asLongStream().toArray();
      String file = one("--source", "");
      new Runs.Call("encode-file", null, file, shape, 0, null, null).make(decoder, Path.of(""));
    } else if (options.containsKey("--source")) {
      decoder.encode(rows("--source"), null);
    }
    for (List<Integer> row : decoder.generate(prompts, how)) {
      System.out.println(row.stream().map(String::valueOf).collect(Collectors.joining(",")));
    }
    return true;
  }
}
