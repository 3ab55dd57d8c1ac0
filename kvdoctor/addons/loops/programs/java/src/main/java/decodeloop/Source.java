package decodeloop;

import ai.onnxruntime.OnnxTensor;
import java.util.Map;

/**
 * What sequences are about. The next sequences begin with the same tensors.
 *
 * @param given what the caller gave
 * @param mask 0 for padding, or null
 * @param encoded what the encoder made of it, empty without one
 */
record Source(OnnxTensor given, int[][] mask, Map<String, OnnxTensor> encoded) {
  boolean owns(OnnxTensor tensor) {
    return tensor == given || encoded.containsValue(tensor);
  }

  void close() {
    given.close();
    encoded.values().forEach(OnnxTensor::close);
  }
}
