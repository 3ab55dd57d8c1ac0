package decodeloop;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtException;
import decodeloop.Contract.Fill;
import decodeloop.Contract.Slot;
import decodeloop.Tensors.Part;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** The tensors that go from call to call. One is closed as soon as the next one is there. */
final class Cache {
  static final Set<String> CARRIES = Set.of("feed-back", "append", "shift", "drop-oldest", "write");

  private final List<Slot> slots;
  private final Map<String, OnnxTensor> tensors = new HashMap<>();
  private Map<String, OnnxTensor> lent = Map.of();

  Cache(List<Slot> slots) {
    this.slots = slots;
  }

  OnnxTensor get(String past) {
    return tensors.get(past);
  }

  /**
   * Makes what the first call is fed: what the encoder made of a slot, else zeros.
   *
   * @param encoded what the encoder made; the next sequences begin with the same tensors
   */
  void begin(Map<String, Long> sizes, List<Fill> fills, Map<String, OnnxTensor> encoded)
      throws OrtException {
    lent = encoded;
    for (Slot slot : slots) {
      if (slot.zeros() != null) {
        Map<String, Long> first = new HashMap<>(sizes);
        first.put("batch_heads", sizes.get("batch") * slot.heads());
        long[] shape = Inputs.resolve(slot.zeros(), first);
        replace(slot.past(), Tensors.fill(slot.dtype(), shape, null));
      }
    }
    fills.forEach(one -> replace(slots.get(one.slot()).past(), encoded.get(one.output())));
  }

  /**
   * Takes what a call returned. Nothing is replaced until all of it is there.
   *
   * @param outputs those that are taken are removed
   * @param length tokens before the call
   */
  void take(List<Fill> fills, Map<String, OnnxTensor> outputs, int length) throws OrtException {
    Map<String, OnnxTensor> next = new HashMap<>();
    try {
      for (Fill one : fills) {
        Slot slot = slots.get(one.slot());
        if (one.carry().equals("feed-back")) {
          next.put(slot.past(), outputs.remove(one.output()));
        } else if (one.carry().equals("write")) {
          // After the tokens that are there, where nothing is read before the call has succeeded.
          OnnxTensor past = tensors.get(slot.past());
          Tensors.overwrite(past, outputs.get(one.output()), slot.lengthAxis(), length);
        } else {
          next.put(slot.past(), joined(slot, one.carry(), outputs.get(one.output())));
        }
      }
      next.forEach(this::replace);
      next.clear();
    } finally {
      next.values().forEach(OnnxTensor::close);
    }
  }

  private OnnxTensor joined(Slot slot, String carry, OnnxTensor value) throws OrtException {
    int axis = slot.lengthAxis();
    Part rows = Part.of(value, axis);
    if (carry.equals("drop-oldest")) {
      return Tensors.join(value, axis, List.of(rows.range(1, rows.count())));
    }
    OnnxTensor before = tensors.get(slot.past());
    Part past = slot.zeros() == null ? Part.of(before, axis) : Part.ofMade(before, axis);
    int leaving = carry.equals("shift") ? Math.min(rows.count(), past.count()) : 0;
    return Tensors.join(value, axis, List.of(past.range(leaving, past.count()), rows));
  }

  /** Cuts what grows to a length. */
  void cut(int length) throws OrtException {
    for (Slot slot : slots) {
      if (slot.rewinds().equals("cut")) {
        OnnxTensor value = tensors.get(slot.past());
        int axis = slot.lengthAxis();
        List<Part> part = List.of(Part.of(value, axis).range(0, length));
        replace(slot.past(), Tensors.join(value, axis, part));
      }
    }
  }

  /** Makes sequence i a copy of what {@code rows[i]} was. */
  void reorder(int[] rows) throws OrtException {
    for (Slot slot : slots) {
      if (slot.batchAxis() != null) {
        OnnxTensor value = tensors.get(slot.past());
        replace(slot.past(), Tensors.choose(value, slot.batchAxis(), rows, slot.heads()));
      }
    }
  }

  private void replace(String past, OnnxTensor value) {
    free(tensors.put(past, value));
  }

  private void free(OnnxTensor tensor) {
    if (tensor != null && !lent.containsValue(tensor)) {
      tensor.close();
    }
  }

  void clear() {
    tensors.values().forEach(this::free);
    tensors.clear();
  }
}
