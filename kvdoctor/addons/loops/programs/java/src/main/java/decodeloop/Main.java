package decodeloop;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtEpDevice;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/** Decodes from the command line: token ids in, token ids out. */
public final class Main {
  private static final String USAGE =
      """
      Token ids in, token ids out: a line for each sequence.

        --model FOLDER    folder of the model files
        --contract FILE   contract.json of the model (that of the current folder)
        --provider NAME   execution provider of the runtime (CPUExecutionProvider)
        --calls JSON      calls: [{"call": "generate", "rows": [[5, 6, 7]], "most": 20}]
        --runs FILE       without --calls: runs to play (vectors.json of the current folder)
        --record FILE     write what was fed and returned into this file, a trace
      """;

  private Main() {}

  public static void main(String[] args) {
    try {
      System.exit(run(read(args)) ? 0 : 1);
    } catch (OrtException | IOException | RuntimeException failed) {
      // Of a file that is not there, the message is its name alone.
      boolean named = failed.getMessage() == null || failed instanceof IOException;
      System.err.println("error: " + (named ? failed.toString() : failed.getMessage()));
      System.exit(1);
    }
  }

  private static Map<String, String> read(String[] args) {
    Map<String, String> options = new HashMap<>();
    for (int i = 0; i < args.length; i += 2) {
      boolean known = i + 1 < args.length && USAGE.contains("  " + args[i] + " ");
      Contract.require(known, "unknown or without a value: " + args[i] + "\n" + USAGE);
      options.put(args[i], args[i + 1]);
    }
    Contract.require(options.containsKey("--model"), USAGE);
    return options;
  }

  /** Makes the calls, or plays the runs; returns whether these gave the expected tokens. */
  private static boolean run(Map<String, String> options) throws OrtException, IOException {
    Contract contract = Contract.read(Path.of(options.getOrDefault("--contract", "contract.json")));
    String record = options.get("--record");
    try (OrtSession.SessionOptions session = new OrtSession.SessionOptions()) {
      addProvider(session, options.getOrDefault("--provider", "CPUExecutionProvider"));
      Path folder = Path.of(options.get("--model"));
      try (Decoder decoder = new Decoder(folder, contract, session, 512);
          PrintStream lines =
              record == null ? null : new PrintStream(record, StandardCharsets.UTF_8)) {
        if (!options.containsKey("--calls")) {
          Path runs = Path.of(options.getOrDefault("--runs", "vectors.json")).toAbsolutePath();
          return Runs.play(decoder, runs, lines);
        }
        if (lines != null) {
          decoder.trace(lines::println);
        }
        for (Runs.Call call : Runs.calls(options.get("--calls"))) {
          for (List<Integer> row : call.make(decoder, Path.of(""))) {
            System.out.println(row.stream().map(String::valueOf).collect(Collectors.joining(",")));
          }
        }
        return true;
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
}
