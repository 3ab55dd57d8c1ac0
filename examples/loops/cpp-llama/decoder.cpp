#include "decoder.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using Shape = std::vector<std::int64_t>;

constexpr const char* kDecoder = "model.onnx";
// The most tokens of a sequence.
constexpr std::int64_t kMostTokens = 64;
// Token ids are below it.
constexpr std::int64_t kVocabulary = 128;

// The axes of the cache whose size is known only when the loop runs.
enum Axis : std::int64_t { kBatchAxis = -1, kPastAxis = -2 };

// One tensor of the cache.
struct Slot {
  // The input that it is fed to.
  const char* past;
  // The output that first fills it, of the first call.
  const char* made;
  // The output of each later call that carries it on; null where the first value is kept.
  const char* present;
  ONNXTensorElementDataType type;
  std::array<std::int64_t, 4> shape;
  // The axis of the sequences, -1 where there is none.
  int batch_axis;
  // The axis of the tokens, -1 where there is none.
  int length_axis;
  // Whether going back cuts it.
  bool cut;
};

constexpr std::array kCache{
    Slot{
        .past = "past_key_values.0.key",
        .made = "present.0.key",
        .present = "present.0.key",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 2, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.0.value",
        .made = "present.0.value",
        .present = "present.0.value",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 2, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.1.key",
        .made = "present.1.key",
        .present = "present.1.key",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 2, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.1.value",
        .made = "present.1.value",
        .present = "present.1.value",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 2, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
};

constexpr std::array kOutputs{
    "logits",
    "present.0.key",
    "present.0.value",
    "present.1.key",
    "present.1.value",
};

Shape shape_of(const Ort::Value& value) {
  return value.GetTensorTypeAndShapeInfo().GetShape();
}

std::size_t element_size(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return sizeof(float);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return sizeof(std::int64_t);
    default:
      throw std::logic_error("a tensor of element type " + std::to_string(static_cast<int>(type)) + " in the cache");
  }
}

Ort::Value allocated(const Shape& shape, ONNXTensorElementDataType type) {
  Ort::AllocatorWithDefaultOptions allocator;
  return Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type);
}

// The runtime allocates every tensor that is made here, so that none points to memory that ends before it. A tensor
// without elements has perhaps no memory: loops go by the count of elements.
template <typename T, typename Entries>
Ort::Value tensor(const Shape& shape, const Entries& entries) {
  Ort::AllocatorWithDefaultOptions allocator;
  Ort::Value made = Ort::Value::CreateTensor<T>(allocator, shape.data(), shape.size());
  const std::size_t count = made.GetTensorTypeAndShapeInfo().GetElementCount();
  if (count != entries.size()) throw std::invalid_argument("the shape does not fit the number of entries");
  T* out = made.GetTensorMutableData<T>();
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<T>(entries[i]);
  }
  return made;
}

std::size_t elements(const Shape& shape) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

std::vector<std::int64_t> flat(const Tokens& tokens) {
  std::vector<std::int64_t> all;
  for (const auto& row : tokens) all.insert(all.end(), row.begin(), row.end());
  return all;
}

Shape shape_of(const Tokens& rows) {
  const std::int64_t length = rows.empty() ? 0 : std::ssize(rows.front());
  if (std::ranges::any_of(rows, [&](const auto& row) { return std::ssize(row) != length; })) {
    throw std::invalid_argument("the rows of a batch have different lengths");
  }
  return {std::ssize(rows), length};
}

// Refuses what is no token ids for every sequence.
void check_ids(const Tokens& tokens) {
  if (shape_of(tokens).back() == 0) throw std::invalid_argument("every sequence takes at least one token");
  for (const auto& row : tokens) {
    for (const std::int64_t token : row) {
      if (token < 0 || token >= kVocabulary) {
        throw std::invalid_argument("the model has no token " + std::to_string(token));
      }
    }
  }
}

// 1 for tokens; 0 for padding on the left, and for what lies behind the last token. Columns are the cache.
template <typename T>
Ort::Value attention_mask(const Shape& shape, std::int64_t total, std::span<const std::int64_t> padding) {
  const std::int64_t columns = shape.back();
  const std::size_t rows = elements(shape) / static_cast<std::size_t>(std::max<std::int64_t>(columns, 1));
  std::vector<std::int64_t> entries;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::int64_t padded = padding.empty() ? 0 : padding[row * padding.size() / rows];
    for (std::int64_t column = 0; column < columns; ++column) entries.push_back(column >= padded && column < total);
  }
  return tensor<T>(shape, entries);
}

// The positions of the new tokens; padding on the left is not counted.
template <typename T>
Ort::Value positions(const Shape& shape, std::int64_t past, std::span<const std::int64_t> padding) {
  const std::int64_t columns = shape.back();
  const std::size_t rows = elements(shape) / static_cast<std::size_t>(std::max<std::int64_t>(columns, 1));
  std::vector<std::int64_t> entries;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::int64_t padded = padding.empty() ? 0 : padding[row % padding.size()];
    for (std::int64_t column = 0; column < columns; ++column) {
      entries.push_back(std::max<std::int64_t>(past + column - padded, 0));
    }
  }
  return tensor<T>(shape, entries);
}

// Some entries along an axis of a tensor.
struct Piece {
  const Ort::Value& value;
  std::int64_t first;
  std::int64_t count;
};

// Pieces one after the other along an axis. They are copied as bytes, whatever the element type is.
Ort::Value joined(int along, const std::vector<Piece>& pieces) {
  const auto axis = static_cast<std::size_t>(along);
  const auto info = pieces.front().value.GetTensorTypeAndShapeInfo();
  Shape shape = info.GetShape();
  const auto product = [&](std::size_t begin, std::size_t end) {
    return elements(Shape(shape.data() + begin, shape.data() + end));
  };
  const std::size_t outer = product(0, axis);
  const std::size_t entry = product(axis + 1, shape.size()) * element_size(info.GetElementType());

  struct Part {
    const std::byte* data;
    std::size_t bytes;
    std::size_t stride;
  };
  std::vector<Part> parts;
  shape[axis] = 0;
  for (const Piece& piece : pieces) {
    const std::int64_t length = shape_of(piece.value)[axis];
    if (piece.first < 0 || piece.count < 0 || piece.first + piece.count > length) {
      throw std::out_of_range("the cache has " + std::to_string(length) + " entries, too few for this call");
    }
    shape[axis] += piece.count;
    const std::size_t bytes = static_cast<std::size_t>(piece.count) * entry;
    if (bytes == 0) continue;
    const auto* data = static_cast<const std::byte*>(piece.value.GetTensorRawData());
    const std::size_t skipped = static_cast<std::size_t>(piece.first) * entry;
    parts.push_back({data + skipped, bytes, static_cast<std::size_t>(length) * entry});
  }
  Ort::Value whole = allocated(shape, info.GetElementType());
  auto* out = static_cast<std::byte*>(whole.GetTensorMutableRawData());
  for (std::size_t block = 0; block < outer; ++block) {
    for (const Part& part : parts) {
      std::memcpy(out, part.data + block * part.stride, part.bytes);
      out += part.bytes;
    }
  }
  return whole;
}

// The rows of a tensor in another order; a row of the batch is `heads` rows of the tensor.
Ort::Value reordered(const Ort::Value& value, int axis, std::span<const std::size_t> rows, std::int64_t heads = 1) {
  std::vector<Piece> pieces;
  for (const std::size_t row : rows) pieces.push_back({value, static_cast<std::int64_t>(row) * heads, heads});
  return joined(axis, pieces);
}

// The last row of logits of each sequence.
template <typename T>
Logits last_rows(const Ort::Value& value, std::size_t batch) {
  const std::size_t sequence = value.GetTensorTypeAndShapeInfo().GetElementCount() / batch;
  const auto shape = shape_of(value);  // only logits of rank 3 have a row for each new token
  const std::size_t size = shape.size() == 3 ? static_cast<std::size_t>(shape.back()) : sequence;
  const T* data = value.GetTensorData<T>();
  Logits rows;
  for (std::size_t row = 0; row < batch; ++row) {
    const T* end = data + (row + 1) * sequence;
    rows.emplace_back(end - size, end);
  }
  return rows;
}

}  // namespace

Decoder::Decoder(const std::filesystem::path& folder, const Ort::SessionOptions& options)
    : decoder_(env_, (folder / kDecoder).c_str(), options) {
  if (const char* trace = std::getenv("KVDOCTOR_TRACE")) trace_.file = trace;
  reset();
}

void Decoder::Feeds::add(const char* name, Ort::Value value) {
  borrow(name, value);
  own.push_back(std::move(value));  // the handle moves, what it stands for stays where it is
}

void Decoder::Feeds::borrow(const char* name, const Ort::Value& value) {
  names.push_back(name);
  values.push_back(value);
}

void Decoder::reset() {
  clear();
}

std::int64_t Decoder::most_tokens() const {
  return kMostTokens;
}

void Decoder::clear() {
  length_ = 0;
  padding_.clear();
  cache_.clear();
  for (std::size_t i = 0; i < kCache.size(); ++i) cache_.emplace_back(nullptr);
}

Logits Decoder::prefill(const Tokens& prompts) {
  if (prompts.empty()) throw std::invalid_argument("there is no prompt");
  std::size_t longest = 0;
  for (const auto& prompt : prompts) {
    if (prompt.empty()) throw std::invalid_argument("every sequence begins with at least one token");
    longest = std::max(longest, prompt.size());
  }
  Tokens tokens = prompts;
  std::vector<std::int64_t> padding;
  for (auto& row : tokens) {
    const std::size_t padded = longest - row.size();
    padding.push_back(static_cast<std::int64_t>(padded));
    row.insert(row.begin(), padded, 0);
  }
  check_ids(tokens);
  clear();
  padding_ = std::move(padding);
  return advance(tokens);
}

Logits Decoder::step(const Tokens& tokens) {
  if (length_ == 0) throw std::logic_error("begin with prefill()");
  if (tokens.size() != padding_.size()) {
    throw std::invalid_argument("a step takes tokens of each of " + std::to_string(padding_.size()) + " sequences");
  }
  check_ids(tokens);
  return advance(tokens);
}

// Runs one call on new tokens and keeps what it returns of the cache.
Logits Decoder::advance(const Tokens& tokens) {
  const std::int64_t count = std::ssize(tokens.front());
  if (length_ + count > most_tokens()) {
    throw std::length_error("a sequence has at most " + std::to_string(most_tokens()) + " tokens here");
  }
  const bool first = length_ == 0;
  if (first) fill_first(std::ssize(tokens));
  Values outputs = run(decoder_, kDecoder, feeds(tokens), kOutputs);
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    const char* name = kCache[i].present;
    if (name == nullptr) continue;
    if (auto output = outputs.extract(name)) {
      cache_[i] = std::move(output.mapped());
    }
  }
  length_ += count;
  return last_rows<float>(outputs.at("logits"), tokens.size());
}

Decoder::Feeds Decoder::feeds(const Tokens& tokens) const {
  const std::int64_t batch = std::ssize(tokens);
  const std::int64_t count = std::ssize(tokens.front());
  const std::int64_t past = length_;
  const std::int64_t total = length_ + std::ssize(tokens.front());
  Feeds fed;
  fed.add("input_ids", tensor<std::int64_t>({batch, count}, flat(tokens)));
  fed.add("attention_mask", attention_mask<std::int64_t>({batch, total}, total, padding_));
  fed.add("position_ids", positions<std::int64_t>({batch, count}, past, padding_));
  for (std::size_t i = 0; i < kCache.size(); ++i) fed.borrow(kCache[i].past, cache_[i]);
  return fed;
}

// What the first call is fed: zeros.
void Decoder::fill_first(std::int64_t batch) {
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    const Slot& slot = kCache[i];
    Shape shape(slot.shape.begin(), slot.shape.end());
    for (std::int64_t& size : shape) {
      if (size == kBatchAxis) size = batch;
      if (size == kPastAxis) size = 0;
    }
    cache_[i] = allocated(shape, slot.type);
    const std::size_t bytes = elements(shape) * element_size(slot.type);
    if (bytes > 0) std::memset(cache_[i].GetTensorMutableRawData(), 0, bytes);
  }
}

void Decoder::rewind(std::int64_t count) {
  const std::int64_t shortest = length_ - (padding_.empty() ? 0 : std::ranges::max(padding_));
  if (count < 0 || count >= shortest) {
    throw std::invalid_argument("only " + std::to_string(shortest) + " tokens are there, of which one must stay");
  }
  length_ -= count;
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    if (kCache[i].cut) cache_[i] = joined(kCache[i].length_axis, {{cache_[i], 0, length_}});
  }
}

void Decoder::reorder(std::span<const std::size_t> rows) {
  if (length_ == 0) throw std::logic_error("begin with prefill()");
  if (rows.empty()) throw std::invalid_argument("no row would be left");
  for (const std::size_t row : rows) {
    if (row >= padding_.size()) throw std::invalid_argument("there is no row " + std::to_string(row));
  }
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    if (cache_[i] && kCache[i].batch_axis >= 0) {
      cache_[i] = reordered(cache_[i], kCache[i].batch_axis, rows);
    }
  }
  std::vector<std::int64_t> padding;
  for (const std::size_t row : rows) padding.push_back(padding_[row]);
  padding_ = std::move(padding);
}

Tokens Decoder::generate(const Tokens& prompts, std::size_t most, std::span<const std::int64_t> stop,
                         const Choose& choose, const OnToken& on_token) {
  if (most == 0) throw std::invalid_argument("most is at least 1");
  Tokens made(prompts.size());
  std::vector<bool> running(prompts.size(), true);
  Logits logits = prefill(prompts);
  while (true) {
    Tokens next;
    bool ended = true;
    for (std::size_t row = 0; row < logits.size(); ++row) {
      const std::int64_t token = choose ? choose(logits[row]) : likeliest(logits[row]);
      next.push_back({token});
      running[row] = running[row] && std::ranges::find(stop, token) == stop.end();
      if (running[row]) {
        made[row].push_back(token);
        if (on_token) on_token(row, token);
        if (made[row].size() < most) ended = false;
      }
    }
    if (ended || length_ >= most_tokens()) return made;
    logits = step(next);
  }
}

// Runs one call. What it returns stays with the runtime; the handles release it.
Decoder::Values Decoder::run(Ort::Session& session, const char* file, const Feeds& fed,
                             std::span<const char* const> names) const {
  std::vector<OrtValue*> got(names.size());
  // Session::Run of the C++ interface takes an array of values that own themselves; these are borrowed.
  const std::size_t inputs = fed.names.size();
  const Ort::Status status{Ort::GetApi().Run(
      session, nullptr, fed.names.data(), fed.values.data(), inputs, names.data(), names.size(), got.data())};
  Values values;
  for (std::size_t i = 0; i < names.size(); ++i) values.emplace(names[i], Ort::Value{got[i]});
  if (!trace_.file.empty()) {
    Tensors given;
    Tensors returned;
    for (std::size_t i = 0; i < fed.names.size(); ++i) {
      given.emplace_back(fed.names[i], Ort::ConstValue{fed.values[i]});
    }
    if (status.IsOK()) {
      for (const auto& [name, value] : values) returned.emplace_back(name, value.GetConst());
    }
    trace_.note(file, given, returned, status);
  }
  Ort::ThrowOnError(status);
  return values;
}

std::int64_t likeliest(std::span<const float> logits) {
  return std::ranges::max_element(logits) - logits.begin();
}
