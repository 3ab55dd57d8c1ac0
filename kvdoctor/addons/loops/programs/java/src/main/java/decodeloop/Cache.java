package decodeloop;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtException;
import decodeloop.Contract.Slot;
import decodeloop.Tensors.Part;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The tensors that go from call to call. One is closed as soon as the next one is there. */
final class Cache {
  private final Contract contract;
  private final int capacity;
  private final Map<String, OnnxTensor> tensors = new HashMap<>();
  private OnnxTensor states;
  private Source source;

  Cache(Contract contract, int capacity) {
    this.contract = contract;
    this.capacity = capacity;
  }

  OnnxTensor get(String past) {
    return tensors.get(past);
  }

  /** The encoder states of the sequences, or the source itself where no encoder makes them. */
  OnnxTensor states() {
    return states;
  }

  /** Makes what the first call is fed: what the encoder made of a slot, else zeros. */
  void begin(int batch, Source source) throws OrtException {
    this.source = source;
    if (source != null) {
      boolean encodes = contract.calls().encode() != null;
      states = encodes ? source.encoded().get(contract.calls().encode().states()) : source.given();
    }
    for (Slot slot : contract.slots()) {
      if (slot.byEncoder()) {
        replace(slot.past(), source.encoded().get(slot.made()));
      } else if (slot.fedZeros()) {
        Map<String, Long> sizes =
            Map.of(
                "batch",
                (long) batch,
                "batch_heads",
                (long) batch * slot.heads(),
                "past",
                slot.firstLength(),
                "encoder",
                slot.firstLength(),
                "capacity",
                (long) capacity);
        long[] shape = Inputs.resolve(slot.dims(), sizes);
        replace(slot.past(), Tensors.fill(slot.dtype(), shape, null));
      }
    }
  }

  /**
   * Takes what a call returned. Nothing is replaced until all of it is there.
   *
   * @param outputs those that are taken are removed
   * @param length tokens before the call; the first one has none
   */
  void take(Map<String, OnnxTensor> outputs, int length) throws OrtException {
    Map<String, OnnxTensor> next = new HashMap<>();
    try {
      for (Slot slot : contract.slots()) {
        String name = length == 0 ? slot.made() : slot.present();
        OnnxTensor value = outputs.get(name);
        if (value == null || length == 0 && slot.byEncoder()) {
          continue;
        }
        if (!slot.copies()) {
          next.put(slot.past(), outputs.remove(name));
        } else if (slot.carry().equals("write")) {
          // After the tokens that are there, where nothing is read before the call has succeeded.
          Tensors.overwrite(tensors.get(slot.past()), value, slot.lengthAxis(), length);
        } else {
          next.put(slot.past(), joined(slot, value));
        }
      }
      next.forEach(this::replace);
      next.clear();
    } finally {
      next.values().forEach(OnnxTensor::close);
    }
  }

  private OnnxTensor joined(Slot slot, OnnxTensor value) throws OrtException {
    OnnxTensor past = tensors.get(slot.past());
    int axis = slot.lengthAxis();
    Part rows = Part.of(value, axis);
    Part old = slot.byEncoder() ? Part.of(past, axis) : Part.ofMade(past, axis);
    List<Part> parts =
        switch (slot.carry()) {
          case "append" -> List.of(old, rows);
          case "shift" ->
              List.of(old.range(Math.min(rows.count(), old.count()), old.count()), rows);
          default -> List.of(rows.range(1, rows.count())); // drop-oldest
        };
    return Tensors.join(value, axis, parts);
  }

  /** Cuts what grows to a length. */
  void cut(int length) throws OrtException {
    Map<String, OnnxTensor> cut = new HashMap<>();
    for (Slot slot : contract.slots()) {
      if (slot.rewinds().equals("cut")) {
        OnnxTensor value = tensors.get(slot.past());
        int axis = slot.lengthAxis();
        List<Part> part = List.of(Part.of(value, axis).range(0, length));
        cut.put(slot.past(), Tensors.join(value, axis, part));
      }
    }
    cut.forEach(this::replace);
  }

  /** Makes sequence i a copy of what {@code rows[i]} was. */
  void reorder(int[] rows) throws OrtException {
    Map<String, OnnxTensor> chosen = new HashMap<>();
    for (Slot slot : contract.slots()) {
      if (slot.batchAxis() != null) {
        int axis = slot.batchAxis();
        int heads = "batch_heads".equals(slot.dims().get(axis).axis()) ? slot.heads() : 1;
        chosen.put(slot.past(), Tensors.choose(tensors.get(slot.past()), axis, rows, heads));
      }
    }
    if (states != null) {
      OnnxTensor before = states;
      states = Tensors.choose(before, 0, rows, 1);
      free(before);
    }
    chosen.forEach(this::replace);
  }

  private void replace(String past, OnnxTensor value) {
    free(tensors.put(past, value));
  }

  /** Closes a tensor, unless the next sequences begin with it. */
  private void free(OnnxTensor tensor) {
    if (tensor != null && (source == null || !source.owns(tensor))) {
      tensor.close();
    }
  }

  void clear() {
    tensors.values().forEach(this::free);
    tensors.clear();
    free(states);
    states = null;
    source = null;
  }
}
