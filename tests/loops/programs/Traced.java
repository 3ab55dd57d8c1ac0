import ai.onnxruntime.*;
import java.io.PrintStream;
import java.nio.*;
import java.util.*;

public class Traced {
  FUNCTION
  public static void main(String[] args) throws Exception {
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    OrtSession session = environment.createSession(args[0]);
    PrintStream trace = new PrintStream(args[1]);
    Map<String, OnnxTensor> inputs = new HashMap<>();
    for (Map.Entry<String, NodeInfo> input : session.getInputInfo().entrySet()) {
      if (input.getKey().startsWith("past")) {
        long[] shape = ((TensorInfo) input.getValue().getInfo()).getShape();
        shape[0] = 1;
        shape[2] = 0;
        FloatBuffer none = ByteBuffer.allocateDirect(0).order(ByteOrder.nativeOrder()).asFloatBuffer();
        inputs.put(input.getKey(), OnnxTensor.createTensor(environment, none, shape));
      }
    }
    for (int past = 0; past < 4; past++) {
      long[][] mask = new long[1][past + 1];
      Arrays.fill(mask[0], 1);
      inputs.put("input_ids", OnnxTensor.createTensor(environment, new long[][] {{5 + past}}));
      inputs.put("attention_mask", OnnxTensor.createTensor(environment, mask));
      inputs.put("position_ids", OnnxTensor.createTensor(environment, new long[][] {{past}}));
      STATEMENTS
      for (Map.Entry<String, OnnxValue> output : result) {
        if (output.getKey().startsWith("present")) {
          String name = output.getKey().replace("present", "past_key_values");
          inputs.put(name, (OnnxTensor) output.getValue());
        }
      }
    }
  }
}
