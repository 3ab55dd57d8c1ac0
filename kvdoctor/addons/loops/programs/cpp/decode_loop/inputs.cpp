// What a call is fed: each rule of the contract.

#include <algorithm>

#include "decode_loop/decoder.hpp"

namespace decode_loop {

namespace {

/// The sequence that an element belongs to.
std::size_t sequence_of(const Input& one, const Shape& shape, std::size_t batch, std::size_t i) {
  std::size_t each = 1;  // elements from one sequence to the next
  for (std::size_t axis = one.batch_axis.value_or(shape.size()) + 1; axis < shape.size(); ++axis) {
    each *= static_cast<std::size_t>(shape[axis]);
  }
  return i / each % batch;
}

}  // namespace

Decoder::Step Decoder::step_of(std::span<const std::int64_t> ids) const {
  const std::size_t rows = state_.padding.empty() ? std::max<std::size_t>(state_.sources, 1) : state_.padding.size();
  const auto batch = static_cast<std::int64_t>(rows);
  const auto count = static_cast<std::int64_t>(ids.size()) / batch, past = state_.length, total = past + count;
  return {ids,
          {{"batch", batch},
           {"new", count},
           {"last-new", count - 1},
           {"past", past},
           {"total", total},
           {"last", total - 1},
           {"constant", 0},
           {"capacity", capacity_.value_or(1)},
           {"encoder_input", state_.source_length}}};
}

/// The elements of an input that is made for a call.
Elements Decoder::elements(const Input& one, const Shape& shape, const Step& step) const {
  const auto count = static_cast<std::size_t>(std::max<std::int64_t>(step.sizes.at("new"), 1));
  const auto batch = static_cast<std::size_t>(step.sizes.at("batch"));
  const auto past = static_cast<double>(step.sizes.at("past"));
  if (one.rule == "tokens") {
    return [ids = step.ids](std::size_t i) { return static_cast<double>(ids[i]); };
  }
  if (one.rule == "token-and-position") {
    return [ids = step.ids, past](std::size_t i) { return i % 2 == 0 ? static_cast<double>(ids[i / 2]) : past; };
  }
  if (one.rule == "rows") {
    return [&one, shape, batch](std::size_t i) { return static_cast<double>(sequence_of(one, shape, batch, i)); };
  }
  if (one.rule == "positions") {
    return [this, &one, shape, batch, count, past](std::size_t i) {
      const std::int64_t padding = one.batch_axis ? state_.padding[sequence_of(one, shape, batch, i)] : 0;
      return std::max(past + static_cast<double>(i % count) - static_cast<double>(padding), 0.0);
    };
  }
  if (one.rule == "encoder-mask") {
    const Tokens& given = state_.source_mask;
    const bool fits = !given.empty() && given.size() * given[0].size() == elements_of(shape);
    if (!fits) return [](std::size_t) { return 1; };  // where the encoder shortens its input, all states count
    return [&given, columns = given[0].size()](std::size_t i) {
      return static_cast<double>(given[i / columns][i % columns]);
    };
  }
  if (one.rule == "number") {
    const double number = one.count == "constant" ? one.value : static_cast<double>(step.sizes.at(one.count));
    return [number](std::size_t) { return number; };
  }
  return mask(one, shape, step);
}

/// Shows the tokens; in a mask with rows each sees itself and what is before it.
Elements Decoder::mask(const Input& one, const Shape& shape, const Step& step) const {
  const std::int64_t columns = shape.back(), total = step.sizes.at("total");
  const std::int64_t first = one.from_right ? columns - total : 0;  // the column of the first token
  const auto column = [columns, first](std::size_t i) { return static_cast<std::int64_t>(i) % columns - first; };
  const auto value = [&one](bool seen) { return seen ? one.shown : one.hidden; };
  if (one.rows_from) {
    const std::int64_t rows = shape[shape.size() - 2], before = step.sizes.at(*one.rows_from);
    return [=](std::size_t i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / columns % rows;
      return value(0 <= column(i) && column(i) <= before + row);
    };
  }
  const auto batch = static_cast<std::size_t>(step.sizes.at("batch"));
  return [this, &one, shape, batch, total, column, value](std::size_t i) {
    const std::int64_t padding = one.batch_axis ? state_.padding[sequence_of(one, shape, batch, i)] : 0;
    return value(padding <= column(i) && column(i) < total);
  };
}

}  // namespace decode_loop
