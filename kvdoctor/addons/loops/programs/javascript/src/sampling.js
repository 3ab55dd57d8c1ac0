// How a token is chosen from its logits.

import { check } from "./check.js";

/** @import { Choose, Logits, Sampling } from "./types.js" */

/** The index of the largest value. @param {Logits} logits */
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

/** A function that chooses tokens. @param {Sampling} how @returns {Choose} */
export function sampler(how) {
  const { temperature = 0, topK = Infinity, topP = 1, minP = 0, repetitionPenalty: penalty = 1, seed = 0 } = how;
  check(
    temperature >= 0 && topK >= 1 && topP > 0 && minP >= 0 && minP <= 1 && penalty > 0,
    "temperature is 0 or more, topK 1 or more, topP above 0, minP 0 to 1, repetitionPenalty above 0",
  );
  const random = randomNumbers(seed);
  return (logits, tokens) => {
    const scores = logits.slice();
    for (const token of penalty === 1 ? [] : new Set(tokens)) {
      scores[token] = scores[token] > 0 ? scores[token] / penalty : scores[token] * penalty;
    }
    const best = likeliest(scores);
    if (temperature === 0) {
      return best;
    }
    const weights = scores.map((score) => Math.exp((score - scores[best]) / temperature));
    const least = Math.max(leastWeight(weights, topK, topP), minP);
    let left = random() * sum(weights.filter((weight) => weight >= least));
    const drawn = weights.findIndex((weight) => weight >= least && (left -= weight) < 0);
    return drawn < 0 ? best : drawn;
  };
}

/** @param {Float32Array} weights */
const sum = (weights) => weights.reduce((total, weight) => total + weight, 0);

/**
 * The smallest weight that is drawn: those of the `topK` largest, of which the largest have `topP` of their sum.
 *
 * @param {Float32Array} weights - the largest is 1
 * @param {number} topK
 * @param {number} topP
 */
function leastWeight(weights, topK, topP) {
  const sorted = topK < weights.length || topP < 1 ? weights.slice().sort() : weights;
  const top = sorted.subarray(Math.max(sorted.length - Math.floor(topK), 0));
  let [least, left] = [top.length, topP < 1 ? topP * sum(top) : Infinity];
  while (left > 0 && least > 0) {
    left -= top[--least];
  }
  return sorted === weights ? 0 : top[least];
}

/** Numbers from 0 to 1 (mulberry32): Math.random takes no seed. @param {number} seed */
function randomNumbers(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
