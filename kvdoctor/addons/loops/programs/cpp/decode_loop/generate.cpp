// Generation: tokens step by step, the loop over them, and how a token is chosen.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "decode_loop/decoder.hpp"

namespace decode_loop {

Logits::Logits(Ort::Value value, std::size_t batch) : value_(std::move(value)), rows_(batch) {
  const auto info = value_.GetTensorTypeAndShapeInfo();
  const Shape shape = info.GetShape();
  const auto count = info.GetElementCount();
  const bool all = shape.size() == 3 && shape[0] == static_cast<std::int64_t>(batch);
  tokens_ = all ? static_cast<std::size_t>(shape[1]) : 1;
  width_ = tokens_ > 0 ? count / batch / tokens_ : 0;
  const bool floats = with_type(info.GetElementType(), []<typename T>() { return !std::is_integral_v<T>; });
  if (!floats || width_ == 0 || width_ * batch * tokens_ != count) {
    throw ContractError("the graph returns no logits of " + std::to_string(batch) + " sequences");
  }
}

std::span<const float> Logits::after(std::size_t row, std::size_t token) const {
  if (row >= rows_ || token >= tokens_) throw std::invalid_argument("there are no such logits");
  const std::size_t begin = (row * tokens_ + token) * width_;
  const auto type = value_.GetTensorTypeAndShapeInfo().GetElementType();
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return {value_.GetTensorData<float>() + begin, width_};
  std::vector<float>& made = converted_[begin];
  if (made.empty()) {
    with_type(type, [&]<typename T>() {
      const T* data = value_.GetTensorData<T>() + begin;
      std::transform(data, data + width_, std::back_inserter(made), [](T one) { return as_float(one); });
    });
  }
  return made;
}

Stream::Stream(Decoder& decoder, Logits logits, Tokens sequences, Generation generation, Choose choose)
    : decoder_(decoder),
      logits_(std::move(logits)),
      sequences_(std::move(sequences)),
      running_(sequences_.size(), true),
      generation_(std::move(generation)),
      choose_(std::move(choose)) {
  if (sequences_.size() != logits_->rows()) throw std::invalid_argument("give the tokens of each row of the logits");
  for (const auto& sequence : sequences_) begins_.push_back(sequence.size());
}

std::vector<Token> Stream::next() {
  std::vector<Token> tokens;
  if (std::find(running_.begin(), running_.end(), true) == running_.end()) return tokens;
  if (!logits_) {
    Tokens fed;  // of those that have ended as well: what is fed to them does not matter
    for (const auto& sequence : sequences_) fed.push_back({sequence.back()});
    logits_ = decoder_.step(fed);
  }
  std::vector<std::int64_t> chosen(sequences_.size());
  for (std::size_t row = 0; row < chosen.size(); ++row) {
    if (running_[row]) chosen[row] = choose(row, logits_->last(row));
  }
  logits_.reset();
  for (std::size_t row = 0; row < chosen.size(); ++row) {
    if (!running_[row]) continue;
    const auto& end = generation_.end;
    running_[row] = std::find(end.begin(), end.end(), chosen[row]) == end.end();
    if (!running_[row]) continue;
    sequences_[row].push_back(chosen[row]);
    running_[row] = generation_.most == 0 || sequences_[row].size() - begins_[row] < generation_.most;
    tokens.push_back({row, chosen[row]});
  }
  if (decoder_.length() >= decoder_.limit()) std::fill(running_.begin(), running_.end(), false);
  return tokens;
}

std::int64_t Stream::choose(std::size_t row, std::span<const float> logits) const {
  const auto& sequence = sequences_[row];
  for (const auto& [place, id] : generation_.forced) {
    if (place == sequence.size()) return id;
  }
  std::vector<float> left;
  const auto leave_out = [&](const std::vector<std::int64_t>& ids) {
    if (ids.empty()) return;
    if (left.empty()) left.assign(logits.begin(), logits.end());
    for (const std::int64_t id : ids) {
      if (static_cast<std::size_t>(id) < left.size()) {
        left[static_cast<std::size_t>(id)] = -std::numeric_limits<float>::infinity();
      }
    }
  };
  leave_out(generation_.suppress);
  if (sequence.size() == begins_[row]) leave_out(generation_.begin_suppress);
  if (!left.empty()) logits = left;
  return choose_ ? choose_(logits, sequence) : likeliest(logits);
}

Tokens Stream::made() const {
  Tokens all;
  for (std::size_t row = 0; row < sequences_.size(); ++row) {
    all.emplace_back(sequences_[row].begin() + static_cast<std::ptrdiff_t>(begins_[row]), sequences_[row].end());
  }
  return all;
}

Stream Decoder::stream(Logits logits, Tokens sequences, Generation generation, Choose choose) {
  return {*this, std::move(logits), std::move(sequences), std::move(generation), std::move(choose)};
}

Tokens Decoder::generate(const Tokens& prompts, const Generation& generation, const Choose& choose,
                         const OnToken& on_token, const std::stop_token& stop) {
  const auto unset = [](Ort::RunOptions* options) { options->UnsetTerminate(); };
  const std::unique_ptr<Ort::RunOptions, decltype(unset)> after(&run_options_, unset);
  const std::stop_callback terminate(stop, [this] { run_options_.SetTerminate(); });
  std::optional<Stream> tokens;
  bool goes_on = true;
  try {
    tokens.emplace(stream(prefill(prompts), prompts, generation, choose));
    while (goes_on && !stop.stop_requested()) {
      const std::vector<Token> step = tokens->next();
      goes_on = !step.empty();
      for (const Token& token : step) goes_on = goes_on && (!on_token || on_token(token));
    }
  } catch (const Ort::Exception&) {
    if (!stop.stop_requested()) throw;
  }
  return tokens ? tokens->made() : Tokens(prompts.size());
}

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
  std::discrete_distribution<std::size_t> draw(weights.begin(), weights.begin() + static_cast<std::ptrdiff_t>(count));
  return static_cast<std::int64_t>(ids[draw(random_)]);
}

std::int64_t likeliest(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

}  // namespace decode_loop
