// contract.json: what each call is fed, and what becomes of its outputs.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace decode_loop {

/// The contract cannot be read or served, or it is of another model.
struct ContractError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The size of an axis: a number, or where that is -1 the name of what it counts.
struct Dim {
  std::int64_t size = -1;
  std::string axis;
};
using Dims = std::vector<Dim>;

/// An input that is not of the cache, and the rule by which its value is made.
struct Input {
  std::string name;
  ONNXTensorElementDataType dtype;
  Dims dims;
  std::string rule, count;
  double value, shown, hidden;
  bool from_right;
  std::optional<std::string> rows_from;
  std::optional<std::size_t> batch_axis;
  std::optional<std::string> made;
};

/// An output that goes into the cache: the number of the slot, and what becomes of it there.
struct Fill {
  std::size_t slot;
  std::string output, carry;
};

/// The axis of a tensor that counts encoder states.
struct EncoderSize {
  std::string place;
  std::optional<std::string> name;
  std::size_t axis;
};

/// A kind of call.
struct Call {
  std::string file;
  std::vector<Input> inputs;
  std::vector<std::string> pasts, outputs;
  std::optional<std::string> logits;
  std::vector<Fill> fills;
  std::optional<EncoderSize> encoder;

  bool has(std::string_view rule) const;
};

/// The calls that a model has.
struct Calls {
  std::optional<Call> encode, embed;
  Call prefill, decode;

  std::vector<const Call*> all() const;
};

/// A tensor of the cache; `zeros` is the shape of the first value that the loop makes.
struct Slot {
  std::string past;
  ONNXTensorElementDataType dtype;
  std::optional<Dims> zeros;
  std::optional<std::size_t> batch_axis, length_axis;
  std::string rewinds;
  std::int64_t heads;
};

/// The type and the sizes of an input.
struct Port {
  ONNXTensorElementDataType dtype;
  Dims dims;
};

/// A file of the model, and what a session of it must have.
struct File {
  std::string file;
  std::map<std::string, Port> inputs;
  std::vector<std::string> outputs;
};

/// Where a text ends, and what is left out of it: at first the ids of the model's configs.
struct Generation {
  /// What a prompt begins with; ids that end a sequence, and are not among its tokens.
  std::vector<std::int64_t> start, end;
  /// Fed to a sequence that has ended.
  std::optional<std::int64_t> padding;
  /// Ids that are never chosen, and those that are not chosen as the first new token.
  std::vector<std::int64_t> suppress, begin_suppress;
  /// Places, counted from the first token of the prompt, with the id there.
  std::vector<std::pair<std::size_t, std::int64_t>> forced;
  /// The most new tokens of a sequence; 0 sets no bound.
  std::size_t most = 0;
};

/// All that the program knows of a model.
struct Contract {
  /// Reads a file; throws ContractError.
  static Contract read(const std::filesystem::path& file);
  /// Reads its text.
  static Contract parse(std::string_view text);

  std::string model;
  std::vector<File> files;
  Calls calls;
  std::vector<Slot> slots;
  /// What `Decoder::encode` takes, and the axis that is its length.
  std::optional<Input> source;
  std::optional<std::size_t> source_axis;
  /// Token ids are smaller than `vocabulary`, a sequence has at most `context_limit` tokens.
  std::optional<std::int64_t> vocabulary, context_limit;
  /// The number of sequences, where the graph takes one number only.
  std::optional<std::size_t> batch;
  bool one_token, capacity_is_chosen, pads, chunks, rewinds, reorders;
  /// Token ids whose places are for images or audio, which this program does not take.
  std::vector<std::int64_t> placeholders;
  Generation generation;
};

}  // namespace decode_loop
