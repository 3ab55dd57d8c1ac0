package decodeloop;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtException;
import decodeloop.Contract.Axis;
import decodeloop.Contract.Change;
import decodeloop.Contract.Take;
import decodeloop.Contract.Zeros;
import decodeloop.Tensors.Part;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.stream.IntStream;

/** The values that go from call to call. One is closed as soon as the next one is there. */
final class Cache {
  private final Map<String, OnnxTensor> values = new HashMap<>();
  private final Cache encoded;

  /** A cache over what was encoded, which is there until it is replaced, or null. */
  Cache(Cache encoded) {
    this.encoded = encoded;
  }

  OnnxTensor get(String name) {
    OnnxTensor value = values.get(name);
    return value == null && encoded != null ? encoded.get(name) : value;
  }

  void put(String name, OnnxTensor value) {
    OnnxTensor before = values.put(name, value);
    if (before != null) {
      before.close();
    }
  }

  void clear() {
    values.values().forEach(OnnxTensor::close);
    values.clear();
  }

  /** Makes the zeros that the first call is fed. */
  void begin(List<Zeros> zeros, Map<String, Long> sizes) throws OrtException {
    for (Zeros one : zeros) {
      put(one.value(), Tensors.zeros(one.dtype(), Tensors.resolve(one.dims(), sizes)));
    }
  }

  /**
   * Takes what a call returned.
   *
   * @param outputs those that are taken are removed
   * @param length tokens before the call
   */
  void take(List<Take> takes, Map<String, OnnxTensor> outputs, int length) throws OrtException {
    replace(
        takes,
        one -> {
          if (one.axis() == null) {
            return outputs.remove(one.output());
          }
          OnnxTensor value = outputs.get(one.output());
          if (one.carry().equals("write")) {
            // After the tokens that are there, where nothing is read before the call has succeeded.
            Tensors.overwrite(get(one.value()), value, one.axis(), length);
            return null;
          }
          Part rows = Part.of(value, one.axis());
          if (one.carry().equals("drop-oldest")) {
            return Tensors.join(value, one.axis(), List.of(rows.range(1, rows.count())));
          }
          Part past = Part.ofMade(get(one.value()), one.axis()); // it began with zeros
          int leaving = one.carry().equals("shift") ? Math.min(rows.count(), past.count()) : 0;
          Part staying = past.range(leaving, past.count());
          return Tensors.join(value, one.axis(), List.of(staying, rows));
        });
  }

  /** Cuts what grows to a length. */
  void cut(List<Axis> axes, int length) throws OrtException {
    replace(
        axes,
        one -> {
          OnnxTensor value = get(one.value());
          Part part = Part.of(value, one.axis()).range(0, length);
          return Tensors.join(value, one.axis(), List.of(part));
        });
  }

  /** Makes sequence i a copy of what {@code rows[i]} was. */
  void reorder(List<Axis> axes, int[] rows) throws OrtException {
    replace(
        axes,
        one -> {
          OnnxTensor value = get(one.value());
          Part all = Part.of(value, one.axis());
          int each = one.each();
          List<Part> parts =
              IntStream.of(rows).mapToObj(i -> all.range(i * each, (i + 1) * each)).toList();
          return Tensors.join(value, one.axis(), parts);
        });
  }

  private interface Maker<T> {
    OnnxTensor make(T one) throws OrtException;
  }

  /** Replaces values by what is made of them, all or none; null leaves a value. */
  private <T extends Change> void replace(List<T> all, Maker<T> maker) throws OrtException {
    List<OnnxTensor> made = new ArrayList<>();
    try {
      for (T one : all) {
        made.add(maker.make(one));
      }
      for (T one : all) {
        OnnxTensor value = made.remove(0);
        if (value != null) {
          put(one.value(), value);
        }
      }
    } finally {
      made.stream().filter(Objects::nonNull).forEach(OnnxTensor::close);
    }
  }
}
