#include "decode_loop/decoder.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "decode_loop/trace.hpp"

namespace decode_loop {

namespace {

std::filesystem::path path_of(const std::filesystem::path& folder, const std::string& file) {
  return folder / std::filesystem::path(std::u8string(file.begin(), file.end()));
}

/// Compares a session with what the contract says of its file.
void check(const File& file, const Ort::Session& session) {
  const auto other = [&file](const std::string& what) {
    throw ContractError("contract.json is of another model: " + file.file + " has " + what);
  };
  const std::vector<std::string> inputs = session.GetInputNames(), outputs = session.GetOutputNames();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto port = file.inputs.find(inputs[i]);
    if (port == file.inputs.end()) other("an input \"" + inputs[i] + "\" that the contract does not feed");
    const auto type_info = session.GetInputTypeInfo(i);
    const auto info = type_info.GetTensorTypeAndShapeInfo();
    const auto& [type, dims] = port->second;
    if (info.GetElementType() != type) other("another type of \"" + inputs[i] + "\"");
    const Shape shape = info.GetShape();
    if (shape.empty()) continue;  // a graph that declares no shape looks like one of a scalar here
    if (!std::ranges::equal(shape, dims,
                            [](std::int64_t size, const Dim& dim) { return size < 0 || size == dim.size; })) {
      other("other sizes of \"" + inputs[i] + "\"");
    }
  }
  for (const auto& [name, port] : file.inputs) {
    if (std::ranges::find(inputs, name) == inputs.end()) other("no input \"" + name + "\"");
  }
  for (const std::string& name : file.outputs) {
    if (std::ranges::find(outputs, name) == outputs.end()) other("no output \"" + name + "\"");
  }
}

/// A shape; an axis that the program does not count has size 1.
Shape shape_of_dims(const Dims& dims, const std::map<std::string_view, std::int64_t>& sizes) {
  Shape shape;
  for (const Dim& dim : dims) {
    const auto counted = sizes.find(dim.axis);
    shape.push_back(dim.size >= 0 ? dim.size : counted == sizes.end() ? 1 : counted->second);
  }
  return shape;
}

/// The rows of a tensor, of so many entries each, in another order.
Ort::Value taken(const Ort::Value& value, std::size_t axis, std::int64_t entries, std::span<const std::size_t> rows) {
  std::vector<Rows> pieces;
  for (const std::size_t row : rows) {
    const auto begin = static_cast<std::int64_t>(row) * entries;
    pieces.push_back({&value, begin, begin + entries});
  }
  return join(axis, pieces);
}

}  // namespace

Decoder::Decoder(const Ort::Env& env, const std::filesystem::path& folder, Contract contract,
                 const Ort::SessionOptions& options, std::int64_t capacity)
    : contract_(std::make_shared<const Contract>(std::move(contract))),
      capacity_(contract_->capacity_is_chosen ? capacity : contract_->context_limit) {
  for (const File& file : contract_->files) {
    const auto path = path_of(folder, file.file);
    if (!std::filesystem::exists(path)) throw std::invalid_argument("there is no file " + path.string());
    check(file, sessions_.emplace(file.file, Ort::Session(env, path.c_str(), options)).first->second);
  }
  for (std::size_t slot = 0; slot < contract_->slots.size(); ++slot) slots_[contract_->slots[slot].past] = slot;
}

void Decoder::trace_to(Trace trace) { trace_ = std::move(trace); }

std::optional<std::int64_t> Decoder::limit() const {
  if (capacity_ && contract_->context_limit) return std::min(*capacity_, *contract_->context_limit);
  return capacity_ ? capacity_ : contract_->context_limit;
}

// The source of an encoder.

bool Decoder::source_is_ids() const {
  return contract_->source && (contract_->source->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ||
                               contract_->source->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
}

void Decoder::encode(const Tokens& sources) {
  std::size_t longest = 0;
  for (const auto& row : sources) longest = std::max(longest, row.size());
  if (!source_is_ids() || longest == 0) throw std::invalid_argument("this model takes no ids as its source");
  Tokens mask;
  std::vector<std::int64_t> ids;
  for (const auto& row : sources) {
    if (row.empty() || std::ranges::min(row) < 0) throw std::invalid_argument("a source has ids, which are 0 or more");
    ids.insert(ids.end(), row.begin(), row.end());
    ids.resize(ids.size() + longest - row.size(), 0);
    mask.emplace_back(row.size(), 1).resize(longest, 0);
  }
  const Shape shape{static_cast<std::int64_t>(sources.size()), static_cast<std::int64_t>(longest)};
  encode_elements(shape, [&ids](std::size_t i) { return static_cast<double>(ids[i]); }, std::move(mask));
}

void Decoder::encode(std::span<const float> values, const Shape& shape, const Tokens& mask) {
  if (!contract_->source) throw std::invalid_argument("this model has no encoder");
  const bool full = std::ranges::all_of(shape, [](std::int64_t size) { return size > 0; });
  if (!full || elements_of(shape) != values.size()) {
    throw std::invalid_argument(std::to_string(values.size()) + " elements are not those of the shape");
  }
  encode_elements(shape, [values](std::size_t i) { return static_cast<double>(values[i]); }, mask);
}

void Decoder::encode_elements(const Shape& shape, const Elements& at, Tokens mask) {
  const Input& source = *contract_->source;
  const auto fits = [](std::int64_t size, const Dim& dim) { return dim.size < 0 || size == dim.size; };
  if (!std::ranges::equal(shape, source.dims, fits)) {
    throw std::invalid_argument("the source has other axes than the contract says");
  }
  const std::int64_t length = shape.at(contract_->source_axis.value());
  for (const auto& row : mask) {
    if (static_cast<std::int64_t>(row.size()) != length) {
      throw std::invalid_argument("the mask of this source has " + std::to_string(length) + " columns");
    }
  }
  State before = std::exchange(state_, State{});
  try {
    if (source.batch_axis) state_.sources = static_cast<std::size_t>(shape[*source.batch_axis]);
    state_.source_length = length;
    state_.source_mask = std::move(mask);
    state_.given.emplace("", tensor(shape, source.dtype, at));
    if (contract_->calls.encode) state_.given.merge(run(*contract_->calls.encode, {}));
  } catch (...) {
    state_ = std::move(before);
    throw;
  }
}

// The sequences.

void Decoder::check_ids(std::span<const std::int64_t> ids) const {
  for (const std::int64_t id : ids) {
    if (id < 0 || (contract_->vocabulary && id >= *contract_->vocabulary)) {
      const std::string most = contract_->vocabulary ? " to " + std::to_string(*contract_->vocabulary - 1) : "";
      throw std::invalid_argument("token ids are 0" + most + ", not " + std::to_string(id));
    }
    const auto& refused = contract_->placeholders;
    if (std::find(refused.begin(), refused.end(), id) != refused.end()) {
      throw std::invalid_argument("token " + std::to_string(id) +
                                  " stands for an image or audio, which this program does not take");
    }
  }
}

void Decoder::check_room(std::int64_t total) const {
  if (const auto most = limit(); most && total > *most) {
    throw std::invalid_argument(std::to_string(total) + " tokens; a sequence has at most " + std::to_string(*most) +
                                " here");
  }
}

Logits Decoder::prefill(const Tokens& prompts) {
  if (contract_->source && (state_.given.empty() || state_.moved)) {
    throw std::logic_error("begin with encode(), and again after reorder()");
  }
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  std::vector<std::int64_t> ids, padding;
  for (const auto& prompt : prompts) {
    if (prompt.empty()) throw std::invalid_argument("a prompt needs at least one token");
    if (prompt.size() != longest && !contract_->pads) {
      throw std::invalid_argument("this model takes no padding: the prompts must have the same length");
    }
    check_ids(prompt);
    padding.push_back(static_cast<std::int64_t>(longest - prompt.size()));
    ids.insert(ids.end(), longest - prompt.size(), 0);
    ids.insert(ids.end(), prompt.begin(), prompt.end());
  }
  const std::size_t batch = contract_->batch.value_or(state_.sources > 0 ? state_.sources : prompts.size());
  if (prompts.size() != batch || prompts.empty()) {
    throw std::invalid_argument(std::to_string(prompts.size()) + " prompts, but there must be " +
                                std::to_string(std::max<std::size_t>(batch, 1)));
  }
  check_room(static_cast<std::int64_t>(longest));
  state_.length = 0;
  state_.padding = std::move(padding);
  state_.cache.clear();  // releases the values before others are made
  try {
    auto sizes = step_of({}).sizes;
    for (const Slot& slot : contract_->slots) {
      sizes["batch_heads"] = static_cast<std::int64_t>(batch) * slot.heads;
      state_.cache.push_back(slot.zeros ? zeros(shape_of_dims(*slot.zeros, sizes), slot.dtype) : Ort::Value{nullptr});
    }
    if (!contract_->one_token) return advance(ids);
    std::optional<Logits> logits;
    std::vector<std::int64_t> column(batch);
    for (std::size_t position = 0; position < longest; ++position) {
      for (std::size_t row = 0; row < batch; ++row) column[row] = ids[row * longest + position];
      logits = advance(column);
    }
    return std::move(*logits);
  } catch (...) {
    state_.length = 0;
    state_.cache.clear();
    throw;
  }
}

Logits Decoder::step(const Tokens& tokens) {
  if (state_.length == 0) throw std::logic_error("begin with prefill()");
  const std::size_t count = tokens.empty() ? 0 : tokens[0].size();
  std::vector<std::int64_t> ids;
  for (const auto& row : tokens) {
    if (row.size() != count) ids.clear();
    ids.insert(ids.end(), row.begin(), row.end());
  }
  if (tokens.size() != state_.padding.size() || count == 0 || ids.size() != count * tokens.size()) {
    throw std::invalid_argument("a step takes new tokens of " + std::to_string(state_.padding.size()) +
                                " sequences, the same number of each");
  }
  if (count > 1 && (!contract_->chunks || contract_->one_token)) {
    throw std::invalid_argument("a step of this model takes one token of each sequence");
  }
  check_ids(ids);
  check_room(state_.length + static_cast<std::int64_t>(count));
  return advance(ids);
}

/// The value of a slot: what the loop holds, else what the encoder made.
const Ort::Value& Decoder::cached(std::size_t slot) const {
  if (slot < state_.cache.size() && state_.cache[slot]) return state_.cache[slot];
  if (contract_->calls.encode) {
    for (const Fill& one : contract_->calls.encode->fills) {
      if (one.slot == slot) return given(one.output);
    }
  }
  throw std::logic_error("there is nothing to feed to \"" + contract_->slots[slot].past + "\"");
}

/// The source, or what the encoder made of it.
const Ort::Value& Decoder::given(const std::optional<std::string>& name) const {
  const auto found = state_.given.find(name.value_or(""));
  if (found == state_.given.end()) throw std::logic_error("begin with encode()");
  return found->second;
}

/// Runs one call on new tokens, and keeps what it returns of the cache.
Logits Decoder::advance(std::span<const std::int64_t> ids) {
  const Call& call = state_.length == 0 ? contract_->calls.prefill : contract_->calls.decode;
  Values made = run(call, ids);
  Logits logits(std::move(made.at(call.logits.value())), state_.padding.size());
  std::vector<std::pair<std::size_t, Ort::Value>> next;
  for (const Fill& one : call.fills) {
    if (auto value = next_value(one, std::move(made.at(one.output)))) next.emplace_back(one.slot, std::move(*value));
  }
  for (auto& [slot, value] : next) state_.cache[slot] = std::move(value);  // releases the value before
  state_.length += static_cast<std::int64_t>(ids.size() / state_.padding.size());
  return logits;
}

/// Runs a call. What it returns belongs to the caller, and stays in the runtime's memory.
Decoder::Values Decoder::run(const Call& call, std::span<const std::int64_t> ids) {
  Step step = step_of(ids);
  if (const auto& encoder = call.encoder) {
    const auto slot = encoder->name ? slots_.find(*encoder->name) : slots_.end();
    const Ort::Value& counted = encoder->place == "cache" ? cached(slot->second) : given(encoder->name);
    step.sizes["encoder"] = size_of(counted, encoder->axis);
  }
  const Values embedded = call.has("embeddings") ? run(contract_->calls.embed.value(), ids) : Values{};
  std::vector<const char*> names, outputs;
  std::vector<const OrtValue*> fed;
  std::vector<Ort::Value> own;  // for this call alone; the others are borrowed
  const auto feed = [&](const std::string& name, const Ort::Value& value) {
    names.push_back(name.c_str());
    fed.push_back(value);
  };
  for (const Input& one : call.inputs) {
    if (one.rule == "embeddings") {
      feed(one.name, embedded.at(one.made.value()));
    } else if (one.rule == "encoder-input" || one.rule == "encoder-states") {
      feed(one.name, given(one.made));
    } else {
      const Shape shape = shape_of_dims(one.dims, step.sizes);
      feed(one.name, own.emplace_back(tensor(shape, one.dtype, elements(one, shape, step))));
    }
  }
  for (const std::string& past : call.pasts) feed(past, cached(slots_.at(past)));
  for (const std::string& output : call.outputs) outputs.push_back(output.c_str());
  std::vector<OrtValue*> got(outputs.size(), nullptr);
  const Ort::Status status{Ort::GetApi().Run(sessions_.at(call.file), run_options_, names.data(), fed.data(),
                                             names.size(), outputs.data(), got.size(), got.data())};
  Values values;
  Tensors returned;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Ort::Value& value = values.emplace(call.outputs[i], Ort::Value(got[i])).first->second;
    if (trace_ && status.IsOK()) returned.emplace_back(call.outputs[i], value.GetConst());
  }
  if (trace_) {
    Tensors taken;
    for (std::size_t i = 0; i < names.size(); ++i) taken.emplace_back(names[i], Ort::ConstValue(fed[i]));
    trace_(describe_call(call.file, taken, returned, status));
  }
  Ort::ThrowOnError(status);
  return values;
}

/// The next value of a slot: the output itself, or what is made of it; none where it is written into the past.
std::optional<Ort::Value> Decoder::next_value(const Fill& fill, Ort::Value made) {
  if (fill.carry == "feed-back") return made;
  const std::size_t axis = contract_->slots[fill.slot].length_axis.value();
  const std::int64_t count = size_of(made, axis);
  if (fill.carry == "drop-oldest") return join(axis, {{&made, 1, count}});
  if (fill.carry == "write") {
    write_rows(state_.cache[fill.slot], axis, state_.length, made);
    return std::nullopt;
  }
  const Ort::Value& past = cached(fill.slot);
  const std::int64_t length = size_of(past, axis), leaving = fill.carry == "shift" ? std::min(count, length) : 0;
  return join(axis, {{&past, leaving, length}, {&made, 0, count}});
}

void Decoder::rewind(std::int64_t count) {
  if (!contract_->rewinds) throw std::invalid_argument("a part of this cache cannot go back");
  const std::int64_t padded = state_.padding.empty() ? 0 : std::ranges::max(state_.padding);
  if (count < 0 || count >= state_.length - padded) {
    throw std::invalid_argument("cannot forget " + std::to_string(count) + " of " +
                                std::to_string(state_.length - padded) + " tokens");
  }
  replace([&](const Slot& slot, const Ort::Value& value) {
    const bool cut = slot.rewinds == "cut";
    return cut ? join(slot.length_axis.value(), {{&value, 0, state_.length - count}}) : Ort::Value{nullptr};
  });
  state_.length -= count;
}

void Decoder::reorder(std::span<const std::size_t> rows) {
  if (state_.length == 0) throw std::logic_error("begin with prefill()");
  if (!contract_->reorders) throw std::invalid_argument("the sequences of this model cannot be reordered");
  const std::size_t batch = state_.padding.size();
  if (rows.empty() || std::any_of(rows.begin(), rows.end(), [batch](std::size_t row) { return row >= batch; })) {
    throw std::invalid_argument("these are not rows of " + std::to_string(batch));
  }
  replace([&](const Slot& slot, const Ort::Value& value) {
    return slot.batch_axis ? taken(value, *slot.batch_axis, slot.heads, rows) : Ort::Value{nullptr};
  });
  for (const Input& one : contract_->calls.decode.inputs) {
    if (one.rule == "encoder-states") {
      Ort::Value& states = state_.given.at(one.made.value_or(""));
      states = taken(states, 0, 1, rows);
    }
  }
  std::vector<std::int64_t> padding;
  Tokens mask;
  for (const std::size_t row : rows) {
    padding.push_back(state_.padding[row]);
    if (!state_.source_mask.empty()) mask.push_back(state_.source_mask[row]);
  }
  state_.padding = std::move(padding);
  state_.source_mask = std::move(mask);
  state_.moved = true;
}

/// Replaces the values of the cache by what a function makes of them, all or none; an empty handle leaves a value.
void Decoder::replace(const std::function<Ort::Value(const Slot&, const Ort::Value&)>& make) {
  std::vector<Ort::Value> made;
  for (std::size_t slot = 0; slot < state_.cache.size(); ++slot) {
    made.push_back(make(contract_->slots[slot], cached(slot)));
  }
  for (std::size_t slot = 0; slot < made.size(); ++slot) {
    if (made[slot]) state_.cache[slot] = std::move(made[slot]);
  }
}

}  // namespace decode_loop
