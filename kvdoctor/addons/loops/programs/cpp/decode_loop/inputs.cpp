// What a call is fed: each rule of the contract.

#include <algorithm>
#include <array>
#include <numeric>

#include "decode_loop/decoder.hpp"

namespace decode_loop {

namespace {

[[noreturn]] void fail_missing(const std::string& name) {
  throw std::logic_error("there is nothing to feed to \"" + name + "\": begin with encode()");
}

}  // namespace

Decoder::Sizes Decoder::sizes(std::size_t ids) const {
  const auto batch =
      static_cast<std::int64_t>(state_.padding.empty() ? state_.sources.value_or(1) : state_.padding.size());
  const std::int64_t fresh = static_cast<std::int64_t>(ids) / batch, past = state_.length;
  return {batch, batch, fresh, past, past + fresh, capacity_.value_or(1), encoder_length(), state_.source_length, 1};
}

Shape Decoder::shape_of_dims(const Dims& dims, const Sizes& sizes) {
  Shape shape;
  for (const std::int64_t dim : dims) shape.push_back(dim < 0 ? sizes.at(static_cast<std::size_t>(dim - kBatch)) : dim);
  return shape;
}

/// The value of a slot; null where there is none yet.
const Ort::Value* Decoder::held(std::size_t slot) const {
  if (slot < state_.cache.size() && state_.cache[slot]) return &state_.cache[slot];
  const auto made = state_.encoded.find(contract_->slots[slot].made);
  return made == state_.encoded.end() ? nullptr : &made->second;
}

/// The states of the encoder: what it returned, or the source where no graph makes them.
const Ort::Value* Decoder::states() const {
  if (!contract_->encode && !contract_->source) return nullptr;
  const auto found = state_.encoded.find(contract_->encode ? contract_->encode->states : contract_->source->name);
  return found == state_.encoded.end() ? nullptr : &found->second;
}

/// The number of encoder states: of those that are there, else of a slot that counts them, else of the source.
std::int64_t Decoder::encoder_length() const {
  const bool there = contract_->encode ? !contract_->encode->states.empty()
                                       : contract_->source && contract_->source->rule == Rule::kEncoderStates;
  if (const Ort::Value* found = states(); found != nullptr && there) return size_of(*found, 1);
  const auto& slots = contract_->slots;
  const auto slot = std::find_if(slots.begin(), slots.end(), [](const Slot& one) { return one.counts_states; });
  if (slot != slots.end() && slot->length_axis >= 0 && (state_.length > 0 || slot->by_encoder)) {
    const Ort::Value* value = held(static_cast<std::size_t>(slot - slots.begin()));
    if (value != nullptr) return size_of(*value, slot->length_axis);
  }
  return state_.source_length;
}

/// All inputs of a call; `embedded` is what the embedding graph made of the new tokens.
Decoder::Feeds Decoder::feeds(const Prepared& prepared, std::span<const std::int64_t> ids,
                              const Values& embedded) const {
  const Sizes counted = sizes(ids.size());
  Feeds made;
  made.own.reserve(prepared.call->inputs.size());
  const auto borrow = [&made](const std::string& name, const Ort::Value* value) {
    if (value == nullptr) fail_missing(name);
    made.names.push_back(name.c_str());
    made.values.push_back(*value);
  };
  const auto find = [](const Values& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : &found->second;
  };
  for (const Input& one : prepared.call->inputs) {
    if (one.rule == Rule::kEmbeddings) {
      borrow(one.name, find(embedded, one.made));
    } else if (one.rule == Rule::kEncoderStates) {
      borrow(one.name, states());
    } else if (one.rule == Rule::kEncoderInput) {
      borrow(one.name, find(state_.encoded, one.name));
    } else {
      const Shape sized = shape_of_dims(one.dims, counted);
      made.own.push_back(with_type(one.type, [&]<typename T>() {
        return tensor<T>(sized, [&](std::span<T> values) { fill<T>(one, sized, counted, ids, values); });
      }));
      borrow(one.name, &made.own.back());
    }
  }
  for (const std::size_t slot : prepared.pasts) borrow(contract_->slots[slot].past, held(slot));
  return made;
}

/// Sets the elements of an input that is made for a call.
template <typename T>
void Decoder::fill(const Input& one, const Shape& shape, const Sizes& sizes, std::span<const std::int64_t> ids,
                   std::span<T> values) const {
  const auto columns = static_cast<std::size_t>(shape.empty() ? 1 : shape.back());
  // Calls a function with each row, the last axis, its number, and the padding of its sequence.
  const auto by_row = [&](auto function) {
    const auto axis = std::find(one.dims.begin(), one.dims.end(), kBatch);
    std::size_t repeated = 1;
    for (auto i = static_cast<std::size_t>(axis - one.dims.begin()) + 1; i + 1 < shape.size(); ++i) {
      repeated *= static_cast<std::size_t>(shape[i]);
    }
    for (std::size_t row = 0; row * columns < values.size(); ++row) {
      const bool own = shape.size() > 1 && !state_.padding.empty();
      const std::int64_t padding = own ? state_.padding[row / repeated % state_.padding.size()] : 0;
      function(values.subspan(row * columns, columns), row, padding);
    }
  };
  const std::int64_t batch = sizes[0], fresh = sizes[2], past = sizes[3], total = sizes[4], encoder_input = sizes[7];
  const auto place = [columns](std::int64_t column) {
    return static_cast<std::ptrdiff_t>(std::clamp<std::int64_t>(column, 0, static_cast<std::int64_t>(columns)));
  };
  switch (one.rule) {
    case Rule::kTokens:
      if (values.size() != ids.size()) throw std::invalid_argument("\"" + one.name + "\" takes other ids");
      std::transform(ids.begin(), ids.end(), values.begin(),
                     [](std::int64_t id) { return element<T>(static_cast<double>(id)); });
      break;
    case Rule::kTokenAndPosition:
      by_row([&](std::span<T> row, std::size_t at, std::int64_t) {
        row[0] = element<T>(static_cast<double>(ids[at]));
        row[1] = element<T>(static_cast<double>(past));
      });
      break;
    case Rule::kAttentionMask:
    case Rule::kPaddingMask:
      by_row([&](std::span<T> row, std::size_t, std::int64_t padding) {
        const bool shown = one.rule == Rule::kAttentionMask;
        std::fill(row.begin(), row.end(), element<T>(shown ? 0 : 1));
        const auto end = place(total);
        std::fill(row.begin() + std::min(place(padding), end), row.begin() + end, element<T>(shown ? 1 : 0));
      });
      break;
    case Rule::kWindowMask:  // the last token is in the last column
      by_row([&](std::span<T> row, std::size_t, std::int64_t padding) {
        const auto begin = row.begin() + place(static_cast<std::int64_t>(columns) - total + padding);
        std::fill(row.begin(), begin, element<T>(0));
        std::fill(begin, row.end(), element<T>(1));
      });
      break;
    case Rule::kCausalMask: {
      const std::size_t queries = static_cast<std::size_t>(shape[shape.size() - 2]);
      const std::int64_t first = one.dims[one.dims.size() - 2] == kTotal ? 0 : past;
      // Where the columns count from the right, the newest token is in the last one.
      const std::int64_t oldest = one.from_right ? static_cast<std::int64_t>(columns) - total : 0;
      by_row([&](std::span<T> row, std::size_t at, std::int64_t) {
        const auto end = oldest + first + static_cast<std::int64_t>(at % queries) + 1;
        std::fill(row.begin(), row.end(), element<T>(one.hidden));
        std::fill(row.begin() + place(oldest), row.begin() + place(end), element<T>(one.shown));
      });
      break;
    }
    case Rule::kPositions:
      by_row([&](std::span<T> row, std::size_t, std::int64_t padding) {
        for (std::size_t i = 0; i < row.size(); ++i) {
          const std::int64_t position = past + static_cast<std::int64_t>(i) - padding;
          row[i] = element<T>(static_cast<double>(std::max<std::int64_t>(position, 0)));
        }
      });
      break;
    case Rule::kRows:
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = element<T>(static_cast<double>(i));
      break;
    case Rule::kEncoderMask: {
      const std::size_t given =
          state_.source_mask.empty() ? 0 : state_.source_mask.size() * state_.source_mask[0].size();
      if (given != values.size()) {  // where the encoder shortens what it reads, all states count
        std::fill(values.begin(), values.end(), element<T>(1));
        break;
      }
      by_row([&](std::span<T> row, std::size_t at, std::int64_t) {
        for (std::size_t i = 0; i < row.size(); ++i)
          row[i] = element<T>(static_cast<double>(state_.source_mask[at][i]));
      });
      break;
    }
    default: {  // in the order of Count
      const double cached = past > 0 ? 1 : 0;
      const std::array<double, 10> counts{one.value,
                                          static_cast<double>(past),
                                          static_cast<double>(total),
                                          static_cast<double>(total - 1),
                                          static_cast<double>(fresh),
                                          static_cast<double>(fresh - 1),
                                          static_cast<double>(batch),
                                          cached,
                                          1 - cached,
                                          static_cast<double>(encoder_input)};
      const double counted = counts.at(static_cast<std::size_t>(one.count));
      std::fill(values.begin(), values.end(), element<T>(counted));
    }
  }
}

}  // namespace decode_loop
