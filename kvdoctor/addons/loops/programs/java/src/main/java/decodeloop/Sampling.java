package decodeloop;

import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import java.util.Random;
import java.util.stream.IntStream;

/**
 * How tokens are drawn; 0 leaves a part out.
 *
 * @param temperature divides the logits; 0 takes the likeliest token
 * @param topK from so many of the likeliest tokens
 * @param topP from the likeliest tokens that have this probability together
 * @param minP from tokens with this part of the probability of the likeliest one
 * @param repetitionPenalty divides logits of tokens that are there, those below 0 it multiplies
 */
public record Sampling(
    double temperature, int topK, double topP, double minP, double repetitionPenalty, long seed) {

  public Sampling {
    if (!(temperature >= 0 && topK >= 0 && topP >= 0 && minP >= 0 && repetitionPenalty >= 0)) {
      throw new IllegalArgumentException("all parts of a sampling are 0 or more");
    }
  }

  /** A choice with random numbers of its own. */
  public Generation.Choose choice() {
    Random random = new Random(seed);
    return (logits, tokens) -> draw(logits, tokens, random);
  }

  private int draw(float[] logits, List<Integer> tokens, Random random) {
    float penalty = repetitionPenalty == 0 ? 1 : (float) repetitionPenalty;
    for (int token : new HashSet<>(tokens)) {
      logits[token] = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
    }
    if (temperature == 0) {
      return Logits.likeliest(logits);
    }
    int[] candidates =
        Logits.ranked(logits).limit(topK == 0 ? logits.length : topK).mapToInt(i -> i).toArray();
    double[] weights =
        IntStream.of(candidates)
            .mapToDouble(i -> Math.exp((logits[i] - logits[candidates[0]]) / temperature))
            .toArray();
    double enough = (topP == 0 ? 1 : topP) * Arrays.stream(weights).sum();
    double sum = 0;
    int count = 0;
    while (count < weights.length && (count == 0 || sum < enough && weights[count] >= minP)) {
      sum += weights[count++];
    }
    double left = random.nextDouble() * sum;
    for (int i = 0; i < count; i++) {
      left -= weights[i];
      if (left < 0) {
        return candidates[i];
      }
    }
    return candidates[0];
  }
}
