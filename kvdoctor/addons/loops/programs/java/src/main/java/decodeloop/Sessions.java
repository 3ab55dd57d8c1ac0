package decodeloop;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import decodeloop.Contract.Call;
import decodeloop.Contract.ModelFile;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.CancellationException;
import java.util.function.Consumer;
import java.util.stream.IntStream;

/** The sessions of a model's files. Calls can be cancelled and written down. */
final class Sessions implements AutoCloseable {
  /** The largest size of a tensor of which a trace has all elements; of others it has so many. */
  private static final int MOST_ELEMENTS = 64;

  private final Map<String, OrtSession> sessions = new HashMap<>();
  private final OrtSession.RunOptions runOptions = new OrtSession.RunOptions();
  private volatile boolean cancelled;
  private Consumer<String> trace;

  Sessions(Path folder, Contract contract, OrtSession.SessionOptions options) throws OrtException {
    try {
      for (ModelFile file : contract.files()) {
        String path = folder.resolve(file.file()).toString();
        OrtSession session = OrtEnvironment.getEnvironment().createSession(path, options);
        sessions.put(file.file(), session);
        Contract.compare(file, session);
      }
    } catch (OrtException | RuntimeException failed) {
      close();
      throw failed;
    }
  }

  void trace(Consumer<String> lines) {
    trace = lines;
  }

  synchronized void cancel() throws OrtException {
    cancelled = true;
    runOptions.setTerminate(true);
  }

  /** Runs one call; the caller owns the outputs. */
  Map<String, OnnxTensor> run(Call call, Map<String, OnnxTensor> fed) throws OrtException {
    requireGoing();
    Map<String, OnnxTensor> outputs = new HashMap<>();
    String error = null;
    try {
      // The result stays open: closing it would close all tensors, and it holds nothing else.
      for (Map.Entry<String, OnnxValue> output :
          sessions.get(call.file()).run(fed, call.outputs(), runOptions)) {
        outputs.put(output.getKey(), (OnnxTensor) output.getValue());
      }
      return outputs;
    } catch (OrtException failed) {
      error = failed.getMessage();
      requireGoing();
      throw failed;
    } finally {
      if (trace != null) {
        note(call.file(), fed, outputs, error);
      }
    }
  }

  /** Throws where the thread was interrupted or the call was cancelled; the next call runs. */
  private synchronized void requireGoing() throws OrtException {
    if (cancelled || Thread.currentThread().isInterrupted()) {
      cancelled = false;
      runOptions.setTerminate(false);
      throw new CancellationException("decoding was cancelled");
    }
  }

  private void note(
      String file, Map<String, OnnxTensor> fed, Map<String, OnnxTensor> got, String error) {
    Map<String, Object> line = new LinkedHashMap<>();
    line.put("file", file);
    line.put("fed", described(fed));
    line.put("got", described(got));
    line.put("error", error);
    trace.accept(Contract.GSON.toJson(line));
  }

  private static Map<String, Object> described(Map<String, OnnxTensor> tensors) {
    Map<String, Object> all = new LinkedHashMap<>();
    tensors.forEach(
        (name, tensor) -> {
          OnnxJavaType type = tensor.getInfo().type;
          int size = (int) tensor.getInfo().getNumElements();
          ByteBuffer data = size == 0 ? null : Tensors.bytes(tensor);
          Map<String, Object> one = new LinkedHashMap<>();
          one.put("dtype", type.name().toLowerCase(Locale.ROOT));
          one.put("shape", tensor.getInfo().getShape());
          one.put(
              size <= MOST_ELEMENTS ? "data" : "sample",
              IntStream.range(0, Math.min(size, MOST_ELEMENTS))
                  .map(k -> size <= MOST_ELEMENTS ? k : (int) sampled(k, size))
                  .mapToObj(i -> json(Tensors.read(data, type, i)))
                  .toArray());
          all.put(name, one);
        });
    return all;
  }

  private static long sampled(long k, long size) {
    return k * (size - 1) / (MOST_ELEMENTS - 1);
  }

  /** Whole numbers without a point; JSON has no NaN and no infinity. */
  private static Number json(double number) {
    if (number == Math.rint(number) && Math.abs(number) < 1e15) {
      return (long) number;
    }
    return Double.isFinite(number) ? number : null;
  }

  @Override
  public void close() throws OrtException {
    for (OrtSession session : sessions.values()) {
      session.close();
    }
    sessions.clear();
    runOptions.close();
  }
}
