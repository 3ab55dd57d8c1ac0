#include "decode_loop/decoder.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <utility>

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
    const auto port = std::find_if(file.inputs.begin(), file.inputs.end(),
                                   [&](const File::Port& one) { return one.name == inputs[i]; });
    if (port == file.inputs.end()) other("an input \"" + inputs[i] + "\" that the contract does not feed");
    const auto type_info = session.GetInputTypeInfo(i);
    const auto info = type_info.GetTensorTypeAndShapeInfo();
    if (info.GetElementType() != port->type) other("another type of \"" + inputs[i] + "\"");
    const Shape shape = info.GetShape();
    if (shape.empty()) continue;  // a graph that declares no shape looks like one of a scalar here
    bool fits = shape.size() == port->dims.size();
    for (std::size_t axis = 0; fits && axis < shape.size(); ++axis) {
      fits = shape[axis] < 0 || port->dims[axis] < 0 || shape[axis] == port->dims[axis];
    }
    if (!fits) other("other sizes of \"" + inputs[i] + "\"");
  }
  for (const File::Port& port : file.inputs) {
    if (std::find(inputs.begin(), inputs.end(), port.name) == inputs.end()) other("no input \"" + port.name + "\"");
  }
  for (const std::string& name : file.outputs) {
    if (std::find(outputs.begin(), outputs.end(), name) == outputs.end()) other("no output \"" + name + "\"");
  }
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
  const auto nothing = [](const Slot&) { return std::string(); };
  if (contract_->encode) encode_ = prepare(*contract_->encode, nothing);
  if (contract_->embed) embed_ = prepare(*contract_->embed, nothing);
  prefill_ = prepare(contract_->prefill, [](const Slot& slot) { return slot.by_encoder ? std::string() : slot.made; });
  decode_ = prepare(contract_->decode, [](const Slot& slot) { return slot.present; });
}

/// What a kind of call needs; `fills` names the output that goes to a slot.
Decoder::Prepared Decoder::prepare(const Call& call, const std::function<std::string(const Slot&)>& fills) {
  const auto unlisted = [](const std::string& what) {
    return ContractError("the contract uses \"" + what + "\" without listing it");
  };
  const auto session = sessions_.find(call.file);
  if (session == sessions_.end()) throw unlisted(call.file);
  Prepared made{.call = &call, .session = &session->second, .outputs = {}, .pasts = {}, .filled = {}, .logits = 0};
  for (const std::string& name : call.outputs) made.outputs.push_back(name.c_str());
  const auto place = [&](const std::string& name) {
    const auto found = std::find(call.outputs.begin(), call.outputs.end(), name);
    if (found == call.outputs.end()) throw unlisted(name);
    return static_cast<std::size_t>(found - call.outputs.begin());
  };
  const auto& slots = contract_->slots;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (const std::string name = fills(slots[slot]); !name.empty()) made.filled.emplace_back(slot, place(name));
  }
  for (const std::string& past : call.pasts) {
    const auto found = std::find_if(slots.begin(), slots.end(), [&](const Slot& one) { return one.past == past; });
    if (found == slots.end()) throw unlisted(past);
    made.pasts.push_back(static_cast<std::size_t>(found - slots.begin()));
  }
  if (!call.logits.empty()) made.logits = place(call.logits);
  return made;
}

std::optional<std::int64_t> Decoder::limit() const {
  if (capacity_ && contract_->context_limit) return std::min(*capacity_, *contract_->context_limit);
  return capacity_ ? capacity_ : contract_->context_limit;
}

// The source of an encoder.

bool Decoder::takes_mask() const {
  const auto calls = contract_->calls();
  return std::any_of(calls.begin(), calls.end(), [](const Call* call) { return call->has(Rule::kEncoderMask); });
}

void Decoder::encode(const Tokens& sources) {
  std::size_t longest = 0;
  for (const auto& row : sources) longest = std::max(longest, row.size());
  Tokens mask;
  std::vector<std::int64_t> ids;
  for (const auto& row : sources) {
    if (row.empty()) throw std::invalid_argument("a source needs at least one id");
    if (row.size() != longest && !takes_mask()) {
      throw std::invalid_argument("this model takes no mask of the source: the sources must have the same length");
    }
    if (std::any_of(row.begin(), row.end(), [](std::int64_t id) { return id < 0; })) {
      throw std::invalid_argument("the ids of the source are 0 or more");
    }
    ids.insert(ids.end(), row.begin(), row.end());
    ids.resize(ids.size() + longest - row.size(), 0);
    mask.emplace_back(row.size(), 1).resize(longest, 0);
  }
  const Shape shape{static_cast<std::int64_t>(sources.size()), static_cast<std::int64_t>(longest)};
  if (!contract_->source_is_ids() || longest == 0) throw std::invalid_argument("this model takes no ids as its source");
  encode_elements(shape,
                  with_type(contract_->source->type,
                            [&]<typename T>() {
                              return tensor<T>(shape, [&ids](std::span<T> values) {
                                std::transform(ids.begin(), ids.end(), values.begin(),
                                               [](std::int64_t id) { return element<T>(static_cast<double>(id)); });
                              });
                            }),
                  takes_mask() ? std::move(mask) : Tokens{});
}

void Decoder::encode(std::span<const float> values, const Shape& shape, const Tokens& mask) {
  if (!contract_->source) throw std::invalid_argument("this model has no encoder");
  if (!mask.empty() && !takes_mask()) throw std::invalid_argument("this model takes no mask of the source");
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 1; }) ||
      elements_of(shape) != values.size()) {
    throw std::invalid_argument(std::to_string(values.size()) + " elements are not those of the shape");
  }
  encode_elements(shape,
                  with_type(contract_->source->type,
                            [&]<typename T>() {
                              return tensor<T>(shape, [values](std::span<T> all) {
                                std::transform(values.begin(), values.end(), all.begin(),
                                               [](float one) { return element<T>(static_cast<double>(one)); });
                              });
                            }),
                  mask);
}

void Decoder::encode_elements(const Shape& shape, Ort::Value value, Tokens mask) {
  const Dims& dims = contract_->source->dims;
  bool fits = shape.size() == dims.size();
  for (std::size_t i = 0; fits && i < dims.size(); ++i) fits = dims[i] < 0 || dims[i] == shape[i];
  if (!fits) throw std::invalid_argument("the source has other axes than the contract says");
  const auto axis = [&dims](Axis one) -> std::optional<std::size_t> {
    const auto found = std::find(dims.begin(), dims.end(), one);
    return found == dims.end() ? std::nullopt : std::optional(static_cast<std::size_t>(found - dims.begin()));
  };
  const auto along = axis(kEncoderInput) ? axis(kEncoderInput) : axis(kEncoder);
  const std::int64_t length = shape[along.value_or(shape.size() - 1)];
  for (const auto& row : mask) {
    if (static_cast<std::int64_t>(row.size()) != length) {
      throw std::invalid_argument("the mask of this source has " + std::to_string(length) + " columns");
    }
  }
  State before = std::exchange(state_, State{});
  try {
    if (const auto rows = axis(kBatch)) state_.sources = static_cast<std::size_t>(shape[*rows]);
    state_.source_length = length;
    state_.source_mask = std::move(mask);
    state_.encoded.emplace(contract_->source->name, std::move(value));
    if (encode_) {
      std::vector<Ort::Value> made = run(*encode_, feeds(*encode_, {}, {}));
      state_.encoded.clear();
      for (std::size_t i = 0; i < made.size(); ++i) state_.encoded.emplace(encode_->outputs[i], std::move(made[i]));
    }
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
  if (contract_->source && (state_.encoded.empty() || state_.reordered)) {
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
  const std::size_t batch = contract_->batch.value_or(state_.sources.value_or(prompts.size()));
  if (prompts.size() != batch || prompts.empty()) {
    throw std::invalid_argument(std::to_string(prompts.size()) + " prompts, but there must be " +
                                std::to_string(std::max<std::size_t>(batch, 1)));
  }
  check_room(static_cast<std::int64_t>(longest));
  state_.length = 0;
  state_.padding = std::move(padding);
  state_.cache.clear();  // releases the values before others are made
  try {
    for (const Slot& slot : contract_->slots) {
      const auto rows = static_cast<std::int64_t>(batch);
      const Sizes first{rows, rows * slot.heads, 1, slot.first_length, 1, capacity_.value_or(1), slot.first_length, 1,
                        1};
      state_.cache.push_back(slot.fed_zeros ? zeros(shape_of_dims(slot.dims, first), slot.type) : Ort::Value{nullptr});
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

/// Runs one call on new tokens, and keeps what it returns of the cache.
Logits Decoder::advance(std::span<const std::int64_t> ids) {
  const Prepared& prepared = state_.length == 0 ? prefill_ : decode_;
  Values embedded;
  if (embed_ && prepared.call->has(Rule::kEmbeddings)) {
    std::vector<Ort::Value> made = run(*embed_, feeds(*embed_, ids, embedded));
    for (std::size_t i = 0; i < made.size(); ++i) embedded.emplace(embed_->outputs[i], std::move(made[i]));
  }
  std::vector<Ort::Value> made = run(prepared, feeds(prepared, ids, embedded));
  Logits logits(std::move(made[prepared.logits]), state_.padding.size());
  std::vector<std::pair<std::size_t, Ort::Value>> next;
  for (const auto& [slot, output] : prepared.filled) {
    if (auto value = next_value(slot, std::move(made[output]))) next.emplace_back(slot, std::move(*value));
  }
  for (auto& [slot, value] : next) state_.cache[slot] = std::move(value);  // releases the value before
  state_.length += static_cast<std::int64_t>(ids.size() / state_.padding.size());
  return logits;
}

/// What a call returns belongs to the caller, and stays in the runtime's memory.
std::vector<Ort::Value> Decoder::run(const Prepared& prepared, const Feeds& feeds) {
  std::vector<OrtValue*> got(prepared.outputs.size(), nullptr);
  const Ort::Status status{Ort::GetApi().Run(*prepared.session, run_options_, feeds.names.data(), feeds.values.data(),
                                             feeds.names.size(), prepared.outputs.data(), got.size(), got.data())};
  std::vector<Ort::Value> values;
  for (OrtValue* one : got) values.emplace_back(one);
  if (!trace_.file.empty()) {
    Tensors fed, returned;
    for (std::size_t i = 0; i < feeds.names.size(); ++i) fed.emplace_back(feeds.names[i], feeds.values[i]);
    for (std::size_t i = 0; status.IsOK() && i < got.size(); ++i) {
      returned.emplace_back(prepared.outputs[i], values[i].GetConst());
    }
    trace_.note(prepared.call->file, fed, returned, status);
  }
  Ort::ThrowOnError(status);
  return values;
}

/// The next value of a slot: the output itself, or what is made of it; none where it is written into the past.
std::optional<Ort::Value> Decoder::next_value(std::size_t slot, Ort::Value present) {
  const Slot& one = contract_->slots[slot];
  Ort::Value& past = state_.cache[slot];
  if (one.length_axis < 0 || one.present.empty() || !past) return present;
  const std::int64_t length = size_of(past, one.length_axis), count = size_of(present, one.length_axis);
  switch (one.carry) {
    case Carry::kAppend:
      return join(one.length_axis, {{&past, 0, length}, {&present, 0, count}});
    case Carry::kShift:
      return join(one.length_axis, {{&past, std::min(count, length), length}, {&present, 0, count}});
    case Carry::kDropOldest:
      return join(one.length_axis, {{&present, 1, count}});
    case Carry::kWrite:
      write_rows(past, one.length_axis, state_.length, present);
      return std::nullopt;
    default:
      return present;
  }
}

void Decoder::rewind(std::int64_t count) {
  if (!contract_->rewinds) throw std::invalid_argument("a part of this cache cannot go back");
  const std::int64_t padded =
      state_.padding.empty() ? 0 : *std::max_element(state_.padding.begin(), state_.padding.end());
  if (count < 0 || count >= state_.length - padded) {
    throw std::invalid_argument("cannot forget " + std::to_string(count) + " of " +
                                std::to_string(state_.length - padded) + " tokens");
  }
  replace([&](const Slot& slot, const Ort::Value& value) {
    const bool cut = slot.cut && slot.length_axis >= 0;
    return cut ? join(slot.length_axis, {{&value, 0, state_.length - count}}) : Ort::Value{nullptr};
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
  const auto taken = [rows](const Ort::Value& value, std::int64_t axis, std::int64_t heads) {
    std::vector<Rows> pieces;
    for (const std::size_t row : rows) {
      const auto begin = static_cast<std::int64_t>(row) * heads;
      pieces.push_back({&value, begin, begin + heads});
    }
    return join(axis, pieces);
  };
  Values encoded;
  for (const auto& [name, value] : state_.encoded) {
    const auto slot = std::find_if(contract_->slots.begin(), contract_->slots.end(),
                                   [&](const Slot& one) { return one.by_encoder && one.made == name; });
    const std::int64_t axis = slot == contract_->slots.end() ? 0 : slot->batch_axis;
    if (axis >= 0 && size_of(value, axis) == static_cast<std::int64_t>(batch)) {
      encoded.emplace(name, taken(value, axis, 1));
    }
  }
  replace([&](const Slot& slot, const Ort::Value& value) {
    if (slot.batch_axis < 0) return Ort::Value{nullptr};
    const bool shared = slot.dims[static_cast<std::size_t>(slot.batch_axis)] == kBatchHeads;
    return taken(value, slot.batch_axis, shared ? slot.heads : 1);
  });
  for (auto& [name, value] : encoded) state_.encoded.insert_or_assign(name, std::move(value));
  std::vector<std::int64_t> padding;
  Tokens mask;
  for (const std::size_t row : rows) {
    padding.push_back(state_.padding[row]);
    if (!state_.source_mask.empty()) mask.push_back(state_.source_mask[row]);
  }
  state_.padding = std::move(padding);
  state_.source_mask = std::move(mask);
  state_.reordered = true;
}

/// Replaces the values of the cache by what a function makes of them, all or none; an empty handle leaves a value.
void Decoder::replace(const std::function<Ort::Value(const Slot&, const Ort::Value&)>& make) {
  std::vector<Ort::Value> made;
  for (std::size_t slot = 0; slot < state_.cache.size(); ++slot) {
    made.push_back(state_.cache[slot] ? make(contract_->slots[slot], state_.cache[slot]) : Ort::Value{nullptr});
  }
  for (std::size_t slot = 0; slot < made.size(); ++slot) {
    if (made[slot]) state_.cache[slot] = std::move(made[slot]);
  }
}

}  // namespace decode_loop
