// How a token is chosen from its logits.

/** @typedef {Float32Array} Logits What each entry of the vocabulary scores, of one sequence. */
/** @typedef {(logits: Logits, tokens: readonly number[]) => number} Choose Picks a token; `tokens` are those so far. */

/**
 * How tokens are drawn; without any of it, the likeliest one is taken.
 *
 * @typedef {object} Sampling
 * @property {number} [temperature] - 0 takes the likeliest token; 0 without it.
 * @property {number} [topK] - Draw from so many of the likeliest; all without it.
 * @property {number} [topP] - Draw from the likeliest that have this probability together; 1 without it.
 * @property {number} [minP] - Draw from tokens with this part of the likeliest one's probability; 0 without it.
 * @property {number} [repetitionPenalty] - Divides the scores of tokens that are there already; 1 without it.
 * @property {number} [seed] - Of the random numbers; 0 without it.
 */

/**
 * The index of the largest value.
 *
 * @param {Logits} logits
 */
export function likeliest(logits) {
  let best = 0;
  // Not with `reduce`: a call for each entry of the vocabulary takes several times as long.
  for (let token = 1; token < logits.length; token++) {
    if (logits[token] > logits[best]) {
      best = token;
    }
  }
  return best;
}

/**
 * A function that chooses tokens.
 *
 * @param {Sampling} how
 * @returns {Choose}
 */
export function sampler(how) {
  const { temperature = 0, topK = Infinity, topP = 1, minP = 0, repetitionPenalty = 1, seed = 0 } = how;
  if (!(temperature >= 0 && topK >= 1 && topP > 0 && minP >= 0 && minP <= 1 && repetitionPenalty > 0)) {
    throw new RangeError(
      "temperature is 0 or more, topK 1 or more, topP above 0, minP 0 to 1, repetitionPenalty above 0",
    );
  }
  const random = randomNumbers(seed);
  return (logits, tokens) => {
    const scores = repetitionPenalty === 1 ? logits : penalized(logits, tokens, repetitionPenalty);
    const best = likeliest(scores);
    if (temperature === 0) {
      return best;
    }
    const weights = scores.map((score) => Math.exp((score - scores[best]) / temperature));
    const least = Math.max(leastWeight(weights, topK, topP), minP);
    let total = 0;
    for (const weight of weights) {
      total += weight >= least ? weight : 0;
    }
    let left = random() * total;
    const drawn = weights.findIndex((weight) => weight >= least && (left -= weight) < 0);
    return drawn < 0 ? best : drawn;
  };
}

/**
 * The smallest weight that is drawn: those of the `topK` largest, of which the largest have `topP` of their sum.
 *
 * @param {Float32Array} weights - the largest is 1
 * @param {number} topK
 * @param {number} topP
 */
function leastWeight(weights, topK, topP) {
  if (topK >= weights.length && topP >= 1) {
    return 0;
  }
  const sorted = weights.slice().sort();
  const first = Math.max(sorted.length - Math.floor(topK), 0);
  let left = 0;
  for (let at = first; at < sorted.length; at++) {
    left += sorted[at];
  }
  left *= topP;
  let least = sorted.length;
  while (left > 0 && least > first) {
    left -= sorted[--least];
  }
  return sorted[least];
}

/**
 * @param {Logits} logits
 * @param {readonly number[]} tokens
 * @param {number} penalty
 */
function penalized(logits, tokens, penalty) {
  const scores = logits.slice();
  for (const token of new Set(tokens)) {
    scores[token] = scores[token] > 0 ? scores[token] / penalty : scores[token] * penalty;
  }
  return scores;
}

/**
 * Numbers from 0 to 1 (mulberry32): Math.random takes no seed.
 *
 * @param {number} seed
 */
function randomNumbers(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
