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

constexpr const char* kEncoder = "encoder_model.onnx";
constexpr const char* kDecoder = "decoder_model_merged.onnx";
// The most tokens of a sequence.
constexpr std::int64_t kMostTokens = 64;
// Token ids are below it.
constexpr std::int64_t kVocabulary = 128;

// The axes of the cache whose size is known only when the loop runs.
enum Axis : std::int64_t { kBatchAxis = -1, kEncoderAxis = -2, kPastAxis = -3 };

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
        .past = "past_key_values.0.decoder.key",
        .made = "present.0.decoder.key",
        .present = "present.0.decoder.key",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.0.decoder.value",
        .made = "present.0.decoder.value",
        .present = "present.0.decoder.value",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.0.encoder.key",
        .made = "present.0.encoder.key",
        .present = nullptr,
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kEncoderAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = false,
    },
    Slot{
        .past = "past_key_values.0.encoder.value",
        .made = "present.0.encoder.value",
        .present = nullptr,
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kEncoderAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = false,
    },
    Slot{
        .past = "past_key_values.1.decoder.key",
        .made = "present.1.decoder.key",
        .present = "present.1.decoder.key",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.1.decoder.value",
        .made = "present.1.decoder.value",
        .present = "present.1.decoder.value",
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kPastAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = true,
    },
    Slot{
        .past = "past_key_values.1.encoder.key",
        .made = "present.1.encoder.key",
        .present = nullptr,
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kEncoderAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = false,
    },
    Slot{
        .past = "past_key_values.1.encoder.value",
        .made = "present.1.encoder.value",
        .present = nullptr,
        .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        .shape = {kBatchAxis, 4, kEncoderAxis, 8},
        .batch_axis = 0,
        .length_axis = 2,
        .cut = false,
    },
};

constexpr std::array kEncoderOutputs{
    "last_hidden_state",
};

constexpr std::array kFirstOutputs{
    "logits",
    "present.0.decoder.key",
    "present.0.decoder.value",
    "present.0.encoder.key",
    "present.0.encoder.value",
    "present.1.decoder.key",
    "present.1.decoder.value",
    "present.1.encoder.key",
    "present.1.encoder.value",
};

constexpr std::array kOutputs{
    "logits",
    "present.0.decoder.key",
    "present.0.decoder.value",
    "present.1.decoder.key",
    "present.1.decoder.value",
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
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return sizeof(bool);
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

template <typename T, typename Number>
Ort::Value filled(const Shape& shape, Number number) {
  return tensor<T>(shape, std::vector<Number>(elements(shape), number));
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

std::string in_words(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

// The mask given to encode(), else ones: a mask of another length belongs to the encoder's input alone.
template <typename T>
Ort::Value encoder_mask(const Shape& shape, const Tokens& given) {
  return !given.empty() && shape_of(given) == shape ? tensor<T>(shape, flat(given)) : filled<T>(shape, 1);
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
    : encoder_(env_, (folder / kEncoder).c_str(), options),
      decoder_(env_, (folder / kDecoder).c_str(), options) {
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
  made_.clear();
  source_mask_.clear();
  moved_ = false;
  clear();
}

std::int64_t Decoder::most_tokens() const {
  return kMostTokens;
}

void Decoder::clear() {
  length_ = 0;
  batch_ = 0;
  cache_.clear();
  for (std::size_t i = 0; i < kCache.size(); ++i) cache_.emplace_back(nullptr);
}

void Decoder::encode(const Source& source, const Tokens& mask) {
  reset();
  if (source.shape.size() != 2 || source.entries.empty()) {
    throw std::invalid_argument("the source has 2 axes and is not empty; got shape " + in_words(source.shape));
  }
  if (std::ranges::any_of(source.entries, [](const auto id) { return id < 0; })) {
    throw std::invalid_argument("the ids of the source are 0 or more");  // a Gather counts others from the end
  }
  sources_ = static_cast<std::size_t>(source.shape[0]);
  const std::int64_t batch = source.shape[0];
  const std::int64_t source_length = source.shape[1];
  const Shape expected{batch, source_length};
  if (!mask.empty() && shape_of(mask) != expected) {
    throw std::invalid_argument("the mask has shape " + in_words(expected) + "; got " + in_words(shape_of(mask)));
  }
  source_mask_ = mask;
  Feeds fed;
  fed.add("input_ids", tensor<std::int64_t>(source.shape, source.entries));
  fed.add("attention_mask", encoder_mask<std::int64_t>({batch, source_length}, source_mask_));
  made_ = run(encoder_, kEncoder, fed, kEncoderOutputs);
}

Logits Decoder::prefill(const Tokens& prompts) {
  if (made_.empty() || moved_) throw std::logic_error("encode() first, and again after reorder()");
  if (prompts.size() != sources_) {
    const std::string sources = std::to_string(sources_);
    throw std::invalid_argument(std::to_string(prompts.size()) + " prompts for " + sources + " sources");
  }
  if (prompts.empty()) throw std::invalid_argument("there is no prompt");
  if (std::ranges::any_of(prompts, [&](const auto& prompt) { return prompt.size() != prompts.front().size(); })) {
    throw std::invalid_argument("the loop does not pad for this model: all prompts must have the same length");
  }
  check_ids(prompts);
  clear();
  batch_ = prompts.size();
  return advance(prompts);
}

Logits Decoder::step(const Tokens& tokens) {
  if (length_ == 0) throw std::logic_error("begin with prefill()");
  if (tokens.size() != batch_) {
    throw std::invalid_argument("a step takes tokens of each of " + std::to_string(batch_) + " sequences");
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
  const std::span<const char* const> names = first ? std::span<const char* const>(kFirstOutputs) : kOutputs;
  Values outputs = run(decoder_, kDecoder, feeds(tokens), names);
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    const char* name = first ? kCache[i].made : kCache[i].present;
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
  const std::int64_t encoder_length = states();
  Feeds fed;
  fed.add("encoder_attention_mask", encoder_mask<std::int64_t>({batch, encoder_length}, source_mask_));
  fed.add("input_ids", tensor<std::int64_t>({batch, count}, flat(tokens)));
  fed.borrow("encoder_hidden_states", made_.at("last_hidden_state"));
  fed.add("use_cache_branch", filled<bool>({1}, past > 0));
  for (std::size_t i = 0; i < kCache.size(); ++i) fed.borrow(kCache[i].past, cache_[i]);
  return fed;
}

// What the first call is fed: zeros that this branch of the graph does not read.
void Decoder::fill_first(std::int64_t batch) {
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    const Slot& slot = kCache[i];
    Shape shape(slot.shape.begin(), slot.shape.end());
    for (std::int64_t& size : shape) {
      if (size == kBatchAxis) size = batch;
      if (size == kEncoderAxis) size = 1;
      if (size == kPastAxis) size = 1;
    }
    cache_[i] = allocated(shape, slot.type);
    const std::size_t bytes = elements(shape) * element_size(slot.type);
    if (bytes > 0) std::memset(cache_[i].GetTensorMutableRawData(), 0, bytes);
  }
}

// The number of encoder states.
std::int64_t Decoder::states() const {
  return shape_of(made_.at("last_hidden_state"))[1];
}

void Decoder::rewind(std::int64_t count) {
  const std::int64_t shortest = length_;
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
    if (row >= batch_) throw std::invalid_argument("there is no row " + std::to_string(row));
  }
  for (std::size_t i = 0; i < kCache.size(); ++i) {
    if (cache_[i] && kCache[i].batch_axis >= 0) {
      cache_[i] = reordered(cache_[i], kCache[i].batch_axis, rows);
    }
  }
  batch_ = rows.size();
  for (auto& [name, value] : made_) {
    value = reordered(value, 0, rows);
  }
  moved_ = true;
  if (!source_mask_.empty()) {
    Tokens mask;
    for (const std::size_t row : rows) mask.push_back(source_mask_.at(row));
    source_mask_ = std::move(mask);
  }
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
