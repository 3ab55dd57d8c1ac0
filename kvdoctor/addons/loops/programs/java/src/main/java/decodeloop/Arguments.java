package decodeloop;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.Function;
import java.util.stream.Stream;

/** Options, each followed by its value; an option may be given several times. */
final class Arguments {
  private final Map<String, List<String>> values = new HashMap<>();

  Arguments(List<String> words, Set<String> known) {
    for (int i = 0; i < words.size(); i += 2) {
      String name = words.get(i);
      if (!known.contains(name)) {
        throw new IllegalArgumentException("unknown option " + name + "; see --help");
      }
      if (i + 1 == words.size()) {
        throw new IllegalArgumentException(name + " needs a value");
      }
      values.computeIfAbsent(name, key -> new ArrayList<>()).add(words.get(i + 1));
    }
  }

  boolean has(String name) {
    return values.containsKey(name);
  }

  /** The last value of an option that must be given. */
  String one(String name) {
    List<String> given = values.get(name);
    if (given == null) {
      throw new IllegalArgumentException(name + " is missing; see --help");
    }
    return given.get(given.size() - 1);
  }

  String one(String name, String otherwise) {
    return has(name) ? one(name) : otherwise;
  }

  <T> T number(String name, T otherwise, Function<String, T> parse) {
    try {
      return has(name) ? parse.apply(one(name)) : otherwise;
    } catch (NumberFormatException failed) {
      throw new IllegalArgumentException(
          name + ": " + one(name) + " is no number that fits here", failed);
    }
  }

  /** The ids of an option that is given once a sequence; none where it is not given. */
  int[][] rows(String name) {
    return values.getOrDefault(name, List.of()).stream()
        .map(text -> ids(name, text))
        .toArray(int[][]::new);
  }

  /** The ids of an option, none where it is not given. */
  int[] ids(String name) {
    return ids(name, one(name, ""));
  }

  /** Integers with commas between them. */
  private static int[] ids(String name, String text) {
    try {
      return Stream.of(text.split(","))
          .map(String::trim)
          .filter(id -> !id.isEmpty())
          .mapToInt(Integer::parseInt)
          .toArray();
    } catch (NumberFormatException failed) {
      throw new IllegalArgumentException(name + ": " + text + " is no list of ids", failed);
    }
  }
}
