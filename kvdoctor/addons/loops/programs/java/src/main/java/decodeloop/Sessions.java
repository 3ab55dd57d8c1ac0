package decodeloop;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import decodeloop.Contract.Call;
import decodeloop.Contract.ModelFile;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CancellationException;
import java.util.function.Consumer;

/** The sessions of a model's files. Calls can be cancelled and written down. */
final class Sessions implements AutoCloseable {
  private static final Gson WITH_NULLS = new GsonBuilder().serializeNulls().create();

  private final Map<String, OrtSession> sessions = new HashMap<>();
  private final OrtSession.RunOptions runOptions = new OrtSession.RunOptions();
  private volatile boolean cancelled;
  private Consumer<String> trace;
  private String run;

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

  void trace(String run, Consumer<String> lines) {
    this.run = run;
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
    JsonObject line = new JsonObject();
    if (run != null) {
      line.addProperty("run", run);
    }
    line.addProperty("file", file);
    line.add("fed", Tensors.described(fed));
    if (error == null) {
      line.add("got", Tensors.described(got));
    }
    line.add("error", error == null ? JsonNull.INSTANCE : new JsonPrimitive(error));
    trace.accept(WITH_NULLS.toJson(line));
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
