// An example over the library: a beam search for one prompt, where the contract has `reorders`.

/** @import { Decoder } from "./decoder.js" */

/** @typedef {{ score: number, tokens: number[], row: number }} Beam The sum of log probabilities, of new tokens. */

/**
 * The new tokens with the best mean log probability that so many sequences find, without the one that ends them.
 *
 * A source is given to `encode` once for each of the beams before it.
 *
 * @param {Decoder} decoder
 * @param {readonly number[]} prompt
 * @param {{ beams?: number, most?: number, stop?: readonly number[] }} [options]
 */
export async function searchBeams(decoder, prompt, { beams: width = 3, most = 20, stop = [] } = {}) {
  let logits = await decoder.prefill(Array(width).fill(prompt));
  /** @type {Beam[]} */
  let beams = [{ score: 0, tokens: [], row: 0 }];
  /** @type {Beam[]} */
  let ended = [];
  const mean = (/** @type {Beam} */ { score, tokens }) => score / Math.max(tokens.length, 1);
  const best = (/** @type {(beam: Beam) => number} */ of) => (/** @type {Beam} */ a, /** @type {Beam} */ b) =>
    of(b) - of(a);
  for (let count = 1; ; count++) {
    const found = beams.flatMap((beam) =>
      likeliestOf(logits[beam.row], 2 * width).map(([token, score]) => ({
        score: beam.score + score,
        tokens: [...beam.tokens, token],
        row: beam.row,
      })),
    );
    found.sort(best(({ score }) => score)).splice(2 * width);
    const ends = (/** @type {Beam} */ { tokens }) => stop.includes(tokens[count - 1]);
    ended.push(...found.slice(0, width).filter(ends));
    ended = ended.sort(best(mean)).slice(0, width);
    beams = found.filter((beam) => !ends(beam)).slice(0, width);
    const done = ended.length === width && mean(ended[width - 1]) >= mean(found[0]);
    if (done || count >= most) {
      const [{ tokens }] = [...ended, ...beams].sort(best(mean));
      return stop.includes(tokens[tokens.length - 1]) ? tokens.slice(0, -1) : tokens;
    }
    await decoder.reorder(beams.map(({ row }) => row));
    logits = await decoder.step(beams.map(({ tokens }) => tokens.slice(-1)));
    beams.forEach((beam, row) => (beam.row = row));
  }
}

/**
 * The likeliest tokens with their log probabilities.
 *
 * @param {Float32Array} logits
 * @param {number} count
 * @returns {(readonly [token: number, score: number])[]}
 */
function likeliestOf(logits, count) {
  const largest = logits.reduce((most, value) => Math.max(most, value), -Infinity);
  const sum = Math.log(logits.reduce((total, value) => total + Math.exp(value - largest), 0)) + largest;
  const tokens = [...logits.keys()].sort((a, b) => logits[b] - logits[a]).slice(0, count);
  return tokens.map((token) => [token, logits[token] - sum]);
}
