#include "decode_loop/decoder.hpp"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <ranges>
#include <stdexcept>
#include <utility>

namespace decode_loop {

namespace {

using nlohmann::json;

/// Tensors of a call by name.
using Tensors = std::vector<std::pair<std::string_view, Ort::ConstValue>>;

constexpr std::size_t kMostElements = 64;  // of a tensor in a line

json describe(const Tensors& tensors) {
  json all = json::object();
  for (const auto& [name, value] : tensors) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const std::size_t size = info.GetElementCount(), count = std::min(size, kMostElements);
    json numbers = json::array();
    with_type(info.GetElementType(), [&]<typename T>() {
      for (std::size_t k = 0; k < count; ++k) {
        const T entry = value.GetTensorData<T>()[size == count ? k : k * (size - 1) / (count - 1)];
        if constexpr (std::is_integral_v<T>) {
          numbers.push_back(entry);
        } else {
          numbers.push_back(as_float(entry));  // null where it is not finite
        }
      }
    });
    all[std::string(name)] = {{"dtype", static_cast<int>(info.GetElementType())},
                              {"shape", info.GetShape()},
                              {size == count ? "data" : "sample", numbers}};
  }
  return all;
}

/// A call of a file of the model as a line of JSON.
std::string describe_call(const std::string& file, const Tensors& fed, const Tensors& got, const Ort::Status& status) {
  json line{{"file", file}, {"fed", describe(fed)}, {"got", describe(got)}, {"error", nullptr}};
  if (!status.IsOK()) line["error"] = status.GetErrorMessage();
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

/// Compares a session with what the contract says of its file.
void check(const File& file, const Ort::Session& session) {
  const auto other = [&file](const std::string& what) {
    throw ContractError("contract.json is of another model: " + file.file + " has " + what);
  };
  const std::vector<std::string> inputs = session.GetInputNames(), outputs = session.GetOutputNames();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto due = file.inputs.find(inputs[i]);
    const auto type_info = session.GetInputTypeInfo(i);
    const auto info = type_info.GetTensorTypeAndShapeInfo();
    const Shape shape = info.GetShape();  // empty where a graph declares none
    const auto same = [](std::int64_t size, std::int64_t wanted) { return size < 0 || size == wanted; };
    if (due == file.inputs.end() || info.GetElementType() != due->second.dtype ||
        (!shape.empty() && !std::ranges::equal(shape, due->second.shape, same))) {
      other("another input \"" + inputs[i] + "\"");
    }
  }
  for (const auto& [name, port] : file.inputs) {
    if (std::ranges::find(inputs, name) == inputs.end()) other("no input \"" + name + "\"");
  }
  for (const std::string& name : file.outputs) {
    if (std::ranges::find(outputs, name) == outputs.end()) other("no output \"" + name + "\"");
  }
}

/// A shape; an axis that nothing counts has size 1.
Shape shape_of_dims(const Dims& dims, const std::map<std::string, double, std::less<>>& sizes) {
  Shape shape;
  for (const Dim& dim : dims) {
    const auto counted = sizes.find(dim.axis);
    shape.push_back(dim.size >= 0 ? dim.size : counted == sizes.end() ? 1 : static_cast<std::int64_t>(counted->second));
  }
  return shape;
}

double sum(const Terms& terms, const std::map<std::string, double, std::less<>>& sizes) {
  double sum = 0;
  for (const auto& [name, factor] : terms) sum += sizes.at(name) * factor;
  return sum;
}

/// Some of a list, in another order.
template <typename List>
List chosen(const List& list, std::span<const std::size_t> rows) {
  List made;
  for (const std::size_t row : rows) made.push_back(list.at(row));
  return made;
}

}  // namespace

Decoder::Decoder(const Ort::Env& env, const std::filesystem::path& folder, Contract contract,
                 const Ort::SessionOptions& options, std::int64_t capacity)
    : contract_(std::make_shared<const Contract>(std::move(contract))),
      capacity_(contract_->capacity_is_chosen ? capacity : contract_->context_limit) {
  for (const File& file : contract_->files) {
    const auto path = folder / std::u8string(file.file.begin(), file.file.end());
    require(std::filesystem::exists(path), "there is no file " + path.string());
    check(file, sessions_.emplace(file.file, Ort::Session(env, path.c_str(), options)).first->second);
  }
}

// The source of an encoder.

void Decoder::encode(const Tokens& sources) {
  std::size_t longest = 0;
  for (const auto& row : sources) longest = std::max(longest, row.size());
  Tokens mask;
  std::vector<std::int64_t> ids;
  const bool even = std::ranges::all_of(sources, [longest](const auto& row) { return row.size() == longest; });
  for (const auto& row : sources) {
    require(!row.empty() && std::ranges::min(row) >= 0, "a source has ids, which are 0 or more");
    ids.insert(ids.end(), row.begin(), row.end());
    ids.resize(ids.size() + longest - row.size(), 0);
    if (!even) mask.emplace_back(row.size(), 1).resize(longest, 0);
  }
  const Shape shape{static_cast<std::int64_t>(sources.size()), static_cast<std::int64_t>(longest)};
  encode_elements(shape, [&ids](std::size_t i) { return static_cast<double>(ids[i]); }, std::move(mask));
}

void Decoder::encode(std::span<const float> values, const Shape& shape, const Tokens& mask) {
  require(elements_of(shape) == values.size(), std::to_string(values.size()) + " elements are not those of the shape");
  encode_elements(shape, [values](std::size_t i) { return static_cast<double>(values[i]); }, mask);
}

void Decoder::encode_elements(const Shape& shape, const Elements& at, Tokens mask) {
  require(contract_->source.has_value(), "this model has no encoder");
  const Source& source = *contract_->source;
  const auto fits = [](std::int64_t size, const Dim& dim) { return size > 0 && (dim.size < 0 || size == dim.size); };
  require(std::ranges::equal(shape, source.dims, fits), "the source has other axes than the contract says");
  require(mask.empty() || source.masked, "this model takes no mask of its source");
  const auto batch = source.batch_axis ? static_cast<std::size_t>(shape[*source.batch_axis]) : 1;
  const auto length = static_cast<std::size_t>(shape.at(source.length_axis));
  const bool whole = std::ranges::all_of(mask, [length](const auto& row) { return row.size() == length; });
  require(mask.empty() || (mask.size() == batch && whole), "the mask has another shape than the source");
  State before = std::exchange(state_, State{});
  try {
    state_.mask = state_.source_mask = std::move(mask);
    state_.encoded.emplace("source", tensor(shape, source.dtype, at));
    run("encode", Tokens(batch));
    state_.encoded.merge(state_.cache);
  } catch (...) {
    state_ = std::move(before);
    throw;
  }
}

// The sequences.

/// Refuses ids that are no tokens of text, and more tokens than there may be.
void Decoder::check_tokens(const Tokens& rows, std::int64_t total, const std::vector<std::int64_t>& padding) const {
  for (const std::int64_t id : rows | std::views::join) {
    require(id >= 0 && id < contract_->vocabulary,
            "token ids are 0 to " + std::to_string(contract_->vocabulary - 1) + ", not " + std::to_string(id));
    require(std::ranges::find(contract_->placeholders, id) == contract_->placeholders.end(),
            "token " + std::to_string(id) + " stands for an image or audio, which this program does not take");
  }
  const bool padded = std::ranges::any_of(padding, [](std::int64_t count) { return count > 0; });
  const std::int64_t most = padded ? std::min(limit(), contract_->context_limit) : limit();  // a ring takes no padding
  require(total <= most, std::to_string(total) + " tokens; a sequence has at most " + std::to_string(most) + " here");
}

Logits Decoder::prefill(const Tokens& prompts) {
  const auto source = state_.encoded.find("source");
  if (contract_->source && source == state_.encoded.end()) throw std::logic_error("begin with encode()");
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  Tokens rows;
  std::vector<std::int64_t> padding;
  for (const auto& prompt : prompts) {
    require(!prompt.empty(), "a prompt needs at least one token");
    require(prompt.size() == longest || contract_->pads,
            "this model takes no padding: the prompts must have the same length");
    padding.push_back(static_cast<std::int64_t>(longest - prompt.size()));
    rows.emplace_back(longest - prompt.size(), 0).insert(rows.back().end(), prompt.begin(), prompt.end());
  }
  const bool counted = contract_->source && contract_->source->batch_axis;
  const std::size_t sources =
      counted ? static_cast<std::size_t>(size_of(source->second, *contract_->source->batch_axis)) : prompts.size();
  const std::size_t batch = std::max<std::size_t>(contract_->batch.value_or(sources), 1);
  require(prompts.size() == batch,
          std::to_string(prompts.size()) + " prompts, but there must be " + std::to_string(batch));
  check_tokens(prompts, static_cast<std::int64_t>(longest), padding);
  clear();  // releases the values before others are made
  state_.padding = std::move(padding);
  try {
    for (const Zeros& one : contract_->zeros) {
      state_.cache.emplace(one.value, zeros(shape_of_dims(one.dims, sizes_of(rows)), one.dtype));
    }
    return advance(rows);
  } catch (...) {
    clear();
    throw;
  }
}

void Decoder::clear() {
  state_.length = 0;
  state_.padding.clear();
  state_.cache.clear();
  state_.mask = state_.source_mask;
}

Logits Decoder::step(const Tokens& tokens) {
  if (state_.length == 0) throw std::logic_error("begin with prefill()");
  const std::size_t count = tokens.empty() ? 0 : tokens[0].size();
  const bool even = std::ranges::all_of(tokens, [count](const auto& row) { return row.size() == count; });
  require(
      tokens.size() == state_.padding.size() && count > 0 && even,
      "a step takes new tokens of " + std::to_string(state_.padding.size()) + " sequences, the same number of each");
  require(count == 1 || contract_->chunks, "a step of this model takes one token of each sequence");
  check_tokens(tokens, state_.length + static_cast<std::int64_t>(count), state_.padding);
  return advance(tokens);
}

/// Runs the calls on new tokens; the logits of the last one.
Logits Decoder::advance(const Tokens& tokens) {
  const auto count = static_cast<std::int64_t>(tokens[0].size());
  // In a ring that is full, one token is written over the oldest.
  const bool alone = contract_->one_token || state_.length + count > contract_->context_limit;
  const std::int64_t size = alone ? 1 : count;
  std::optional<Logits> logits;
  for (std::int64_t at = 0; at < count; at += size) {
    Tokens part;
    for (const auto& row : tokens) part.emplace_back(row.begin() + at, row.begin() + at + size);
    logits = run(state_.length == 0 ? "prefill" : "decode", part);
    state_.length += size;
  }
  return std::move(logits.value());
}

/// Runs the calls of a phase, and takes over what they return of the cache; the logits of the last one, if it has some.
std::optional<Logits> Decoder::run(const std::string& phase, const Tokens& tokens) {
  std::optional<Logits> logits;
  for (const Call& call : contract_->calls.at(phase)) {
    Values made = run_session(call, tokens);
    if (call.logits) logits.emplace(std::move(made.at(*call.logits)), tokens.size());
    take(call.takes, std::move(made));
  }
  return logits;
}

/// What axes and sums count in a call.
Decoder::Sizes Decoder::sizes_of(const Tokens& tokens) const {
  const auto batch = static_cast<double>(tokens.size()), count = static_cast<double>(tokens[0].size());
  const auto past = static_cast<double>(state_.length);
  return {{"one", 1},
          {"batch", batch},
          {"batch_heads", batch * static_cast<double>(contract_->heads)},
          {"new", count},
          {"past", past},
          {"total", past + count},
          {"capacity", static_cast<double>(capacity_)}};
}

/// A value: what the loop holds, else what is encoded.
const Ort::Value& Decoder::value(const std::string& name) const {
  if (const auto found = state_.cache.find(name); found != state_.cache.end()) return found->second;
  if (const auto found = state_.encoded.find(name); found != state_.encoded.end()) return found->second;
  throw std::logic_error("there is no value " + name + ": begin with encode()");
}

/// An input that is made for a call.
Ort::Value Decoder::make(const Made& made, Sizes sizes, const Tokens& tokens) const {
  const Shape shape = shape_of_dims(made.dims, sizes);
  const std::size_t last = shape.empty() ? 0 : shape.size() - 1;
  const auto size = [&shape](std::size_t axis) { return static_cast<std::size_t>(shape[axis]); };
  const std::size_t columns = shape.empty() || made.batch_axis == last ? 1 : size(last);
  std::size_t each = 1;  // rows from one sequence to the next
  for (std::size_t axis = made.batch_axis.value_or(last) + 1; axis < last; ++axis) each *= size(axis);
  const Tokens& copied = made.copy == "tokens" ? tokens : state_.mask;
  std::vector<double> elements(elements_of(shape), made.outside);
  sizes["columns"] = static_cast<double>(columns);
  for (std::size_t row = 0; row * columns < elements.size(); ++row) {
    const std::size_t sequence = made.batch_axis ? row / each % size(*made.batch_axis) : 0;
    const bool padded = made.batch_axis && !state_.padding.empty();
    sizes["sequence"] = static_cast<double>(sequence);
    sizes["padding"] = padded ? static_cast<double>(state_.padding.at(sequence)) : 0;
    sizes["query"] = static_cast<double>(last > 0 ? row % size(last - 1) : 0);
    const double end = std::min(sum(made.end, sizes), sizes["columns"]), inside = sum(made.inside, sizes);
    double* const first = &elements[row * columns];
    for (auto at = static_cast<std::size_t>(std::max(sum(made.begin, sizes), 0.0)); static_cast<double>(at) < end;
         ++at) {
      first[at] = inside + made.step * static_cast<double>(at);
    }
    if (made.copy && !copied.empty() && copied[sequence].size() <= columns) {
      std::ranges::transform(copied[sequence], first, [](std::int64_t one) { return static_cast<double>(one); });
    }
  }
  return tensor(shape, made.dtype, [&elements](std::size_t i) { return elements[i]; });
}

/// Runs a call. What it returns belongs to the caller, and stays in the runtime's memory.
Decoder::Values Decoder::run_session(const Call& call, const Tokens& tokens) {
  Sizes sizes = sizes_of(tokens);
  for (const auto& [name, of] : call.sizes) sizes[name] = static_cast<double>(size_of(value(of.value), of.axis));
  std::vector<const char*> names, outputs;
  std::vector<const OrtValue*> fed;
  std::vector<Ort::Value> own;  // for this call alone; the others are borrowed
  const auto feed = [&](const std::string& name, const Ort::Value& value) {
    names.push_back(name.c_str());
    fed.push_back(value);
  };
  for (const auto& [name, held] : call.values) feed(name, value(held));
  for (const Made& made : call.made) feed(made.name, own.emplace_back(make(made, sizes, tokens)));
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

/// Takes over what a call returned, after all that could fail.
void Decoder::take(const std::vector<Take>& takes, Values made) {
  Values next;
  for (const Take& one : takes) {
    if (auto value = next_value(one, std::move(made.at(one.output)))) next.emplace(one.value, std::move(*value));
  }
  replace(std::move(next));
}

void Decoder::replace(Values next) {
  next.merge(state_.cache);  // what is not replaced
  state_.cache = std::move(next);
}

/// The next value: the output itself, or what is made of it; none where it is written into the past.
std::optional<Ort::Value> Decoder::next_value(const Take& take, Ort::Value made) {
  if (!take.axis) return made;
  const std::int64_t count = size_of(made, *take.axis);
  if (take.carry == "drop-oldest") return join(*take.axis, {{&made, 1, count}});
  if (take.carry == "write") {
    write_rows(state_.cache.at(take.value), *take.axis, state_.length, made);
    return std::nullopt;
  }
  const Ort::Value& past = value(take.value);
  const std::int64_t length = size_of(past, *take.axis), leaving = take.carry == "shift" ? std::min(count, length) : 0;
  return join(*take.axis, {{&past, leaving, length}, {&made, 0, count}});
}

void Decoder::rewind(std::int64_t count) {
  // What a ring has written over is gone.
  require(contract_->rewinds && state_.length <= contract_->context_limit, "a part of this cache cannot go back");
  const std::int64_t shortest = state_.length - (state_.padding.empty() ? 0 : std::ranges::max(state_.padding));
  require(0 <= count && count < shortest,
          "cannot forget " + std::to_string(count) + " of " + std::to_string(shortest) + " tokens");
  Values cut;
  for (const Axis& one : contract_->cut) {
    cut.emplace(one.value, join(one.axis, {{&value(one.value), 0, state_.length - count}}));
  }
  replace(std::move(cut));
  state_.length -= count;
}

void Decoder::reorder(std::span<const std::size_t> rows) {
  if (state_.length == 0) throw std::logic_error("begin with prefill()");
  require(contract_->reorders, "the sequences of this model cannot be reordered");
  const std::size_t batch = state_.padding.size();
  require(!rows.empty() && std::ranges::max(rows) < batch, "these are not rows of " + std::to_string(batch));
  Values made;
  for (const Axis& one : contract_->rows) {
    std::vector<Rows> pieces;
    for (const std::size_t row : rows) {
      const auto begin = static_cast<std::int64_t>(row) * one.each;
      pieces.push_back({&value(one.value), begin, begin + one.each});
    }
    made.emplace(one.value, join(one.axis, pieces));
  }
  replace(std::move(made));
  state_.padding = chosen(state_.padding, rows);
  if (!state_.mask.empty()) state_.mask = chosen(state_.mask, rows);
}

}  // namespace decode_loop
