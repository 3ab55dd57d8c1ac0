// How the next token is chosen from its logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace decode_loop {

/// The likeliest token is taken at the temperature 0. What is not changed has no effect.
struct Sampling {
  float temperature = 0;
  /// Only so many of the likeliest tokens; 0 takes all.
  std::size_t top_k = 0;
  /// Only the likeliest tokens that have this probability together.
  float top_p = 1;
  /// Only tokens with this part of the probability of the likeliest one.
  float min_p = 0;
  /// Logits of tokens that are there already are divided by it where they are positive, else multiplied.
  float repetition_penalty = 1;
  std::uint64_t seed = 0;
};

/// Chooses tokens at random; the same seed gives the same tokens.
class Sampler {
 public:
  explicit Sampler(const Sampling& sampling) : sampling_(sampling), random_(sampling.seed) {}

  /// The next token, of a row of logits and the tokens so far.
  std::int64_t operator()(std::span<const float> logits, std::span<const std::int64_t> tokens);

 private:
  Sampling sampling_;
  std::mt19937_64 random_;
};

/// The token with the largest logit, and the first of them where several are as large.
std::int64_t likeliest(std::span<const float> logits);

}  // namespace decode_loop
