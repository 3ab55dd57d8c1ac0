#include "decode_loop/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace decode_loop {

std::int64_t Sampler::operator()(std::span<const float> logits, std::span<const std::int64_t> tokens) {
  std::vector<float> penalized;
  if (sampling_.repetition_penalty != 1) {
    penalized.assign(logits.begin(), logits.end());
    for (const std::int64_t token : tokens) {
      const auto id = static_cast<std::size_t>(token);
      if (id >= logits.size()) continue;
      penalized[id] =
          logits[id] > 0 ? logits[id] / sampling_.repetition_penalty : logits[id] * sampling_.repetition_penalty;
    }
    logits = penalized;
  }
  if (sampling_.temperature <= 0) return likeliest(logits);
  std::vector<std::size_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), std::size_t{0});
  const auto first = [logits](std::size_t a, std::size_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const std::size_t most = sampling_.top_k > 0 ? std::min(sampling_.top_k, ids.size()) : ids.size();
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(most), ids.end(), first);
  std::vector<float> weights;
  for (std::size_t i = 0; i < most; ++i) {
    weights.push_back(std::exp((logits[ids[i]] - logits[ids[0]]) / sampling_.temperature));
  }
  const float enough = sampling_.top_p * std::accumulate(weights.begin(), weights.end(), 0.0F);
  float reached = 0;
  std::size_t count = 0;
  while (count < most && (count == 0 || (reached < enough && weights[count] >= sampling_.min_p))) {
    reached += weights[count++];
  }
  float left = uniform() * reached;
  for (std::size_t i = 0; i < count; ++i) {
    left -= weights[i];
    if (left < 0) return static_cast<std::int64_t>(ids[i]);
  }
  return static_cast<std::int64_t>(ids[0]);
}

/// A number from 0 to 1, without 1 (SplitMix64).
float Sampler::uniform() {
  state_ += 0x9e3779b97f4a7c15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return static_cast<float>((mixed ^ (mixed >> 31)) >> 40) / static_cast<float>(1 << 24);
}

std::int64_t likeliest(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

}  // namespace decode_loop
