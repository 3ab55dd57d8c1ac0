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

/// Throws where an argument cannot be right.
inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

/// The size of an axis: a number, or where that is -1 the name of what it counts.
struct Dim {
  std::int64_t size = -1;
  std::string axis;
};
using Dims = std::vector<Dim>;

/// A sum: each named number times its factor.
using Terms = std::map<std::string, double>;

/// An input that is made for a call, row by row along its last axis. A row has `inside` from the column `begin` to
/// before `end`, and `step` more for each column, else `outside`; what `copy` names is written over it.
struct Made {
  std::string name;
  ONNXTensorElementDataType dtype;
  Dims dims;
  std::optional<std::size_t> batch_axis;
  std::optional<std::string> copy;
  Terms begin, end, inside;
  double outside, step;
};

/// An output of a call that becomes a value, by a rule along an axis.
struct Take {
  std::string output, value, carry;
  std::optional<std::size_t> axis;
};

/// An axis of a value; a sequence has `each` rows of it.
struct Axis {
  std::string value;
  std::size_t axis;
  std::int64_t each;
};

/// A call of a file.
struct Call {
  std::string file;
  /// The names of the values that inputs are fed.
  std::map<std::string, std::string> values;
  std::vector<Made> made;
  std::vector<std::string> outputs;
  std::optional<std::string> logits;
  std::vector<Take> takes;
  /// The sizes that only values have.
  std::map<std::string, Axis> sizes;
};

/// A value before the first call.
struct Zeros {
  std::string value;
  ONNXTensorElementDataType dtype;
  Dims dims;
};

/// What the caller gives before the prompts; it may have a mask where it is `masked`.
struct Source {
  ONNXTensorElementDataType dtype;
  Dims dims;
  std::optional<std::size_t> batch_axis;
  std::size_t length_axis;
  bool masked;
};

/// The type and the sizes of an input; -1 is any.
struct Port {
  ONNXTensorElementDataType dtype;
  std::vector<std::int64_t> shape;
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
  /// Those of each phase (encode, prefill, decode), in order.
  std::map<std::string, std::vector<Call>> calls;
  std::vector<Zeros> zeros;
  /// What a rewind cuts, and what a reorder changes.
  std::vector<Axis> cut, rows;
  std::int64_t heads;
  std::optional<Source> source;
  /// Token ids are smaller than `vocabulary`. The cache has at most `context_limit` tokens, and a sequence `longest`:
  /// more than fit are written over the oldest.
  std::int64_t vocabulary, context_limit, longest;
  /// The number of sequences, where the graph takes one number only.
  std::optional<std::size_t> batch;
  bool one_token, capacity_is_chosen, pads, chunks, rewinds, reorders;
  /// Token ids whose places are for images or audio, which this program does not take.
  std::vector<std::int64_t> placeholders;
  Generation generation;
};

}  // namespace decode_loop
