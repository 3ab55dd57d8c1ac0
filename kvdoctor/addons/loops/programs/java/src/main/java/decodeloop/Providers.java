package decodeloop;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtProvider;
import ai.onnxruntime.OrtSession;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;

/** Execution providers by their names. */
public final class Providers {
  private Providers() {}

  /**
   * Lets sessions run on a provider, and on the CPU what it does not take.
   *
   * @param name as the runtime has it ({@code CUDAExecutionProvider}) or short ({@code cuda})
   */
  public static void add(OrtSession.SessionOptions options, String name) throws OrtException {
    Set<OrtProvider> available = OrtEnvironment.getAvailableProviders();
    String wanted = plain(name);
    for (OrtProvider provider : available) {
      if (wanted.equals(plain(provider.getName())) || wanted.equals(plain(provider.name()))) {
        add(options, provider);
        return;
      }
    }
    String known = available.stream().map(OrtProvider::getName).collect(Collectors.joining(", "));
    throw new IllegalArgumentException(
        "this runtime has no execution provider " + name + "; it has " + known);
  }

  private static void add(OrtSession.SessionOptions options, OrtProvider provider)
      throws OrtException {
    switch (provider) {
      case CPU -> {} // it is always there
      case CUDA -> options.addCUDA();
      case TENSOR_RT -> options.addTensorrt(0);
      case ROCM -> options.addROCM();
      case DIRECT_ML -> options.addDirectML(0);
      case CORE_ML -> options.addCoreML();
      case NNAPI -> options.addNnapi();
      case QNN -> options.addQnn(Map.of("backend_type", "htp"));
      case XNNPACK -> options.addXnnpack(Map.of());
      case WEBGPU -> options.addWebGPU(Map.of());
      case OPEN_VINO -> options.addOpenVINO("");
      case DNNL -> options.addDnnl(true);
      case ACL -> options.addACL(false);
      default ->
          throw new IllegalArgumentException("the Java binding cannot add " + provider.getName());
    }
  }

  private static String plain(String name) {
    return name.toLowerCase(Locale.ROOT).replace("executionprovider", "").replace("_", "");
  }
}
