// contract.json: what each call is fed, and what becomes of its outputs.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace decode_loop {

/// The contract cannot be read or served, or it is of another model.
struct ContractError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What an axis counts, in place of a size; one that no loop counts has size 1.
enum Axis : std::int64_t { kBatch = -9, kBatchHeads, kNew, kPast, kTotal, kCapacity, kEncoder, kEncoderInput, kOther };
using Dims = std::vector<std::int64_t>;

/// Where the value of an input comes from.
enum class Rule {
  kTokens,
  kTokenAndPosition,
  kEmbeddings,
  kAttentionMask,
  kPaddingMask,
  kWindowMask,
  kCausalMask,
  kPositions,
  kRows,
  kNumber,
  kEncoderInput,
  kEncoderMask,
  kEncoderStates
};
enum class Count { kConstant, kPast, kTotal, kLast, kNew, kLastNew, kBatch, kCached, kFirst, kEncoderInput };

/// What becomes of an output of the cache: it is the next value; the first value stays; its rows follow those that are
/// there; they are written after those of the tokens before; they come in on one side, and the oldest leave on the
/// other; it is the next value without its oldest row.
enum class Carry { kFeedBack, kHold, kAppend, kWrite, kShift, kDropOldest };

/// One input that is not the cache.
struct Input {
  std::string name;
  ONNXTensorElementDataType type;
  Dims dims;
  Rule rule;
  Count count;
  double value, shown, hidden;
  bool from_right;
  std::string made;
};

struct Call {
  std::string file;
  std::vector<Input> inputs;
  std::vector<std::string> pasts, outputs;
  std::string logits, states;

  bool has(Rule rule) const;
};

/// One tensor of the cache. Names that are not there are empty, axes -1.
struct Slot {
  std::string past, present, made;
  bool by_encoder;
  ONNXTensorElementDataType type;
  Dims dims;
  Carry carry;
  std::int64_t batch_axis, length_axis;
  bool counts_states, cut;
  std::int64_t first_length, heads;
  bool fed_zeros;
};

/// One file of the model, and what a session of it must have.
struct File {
  struct Port {
    std::string name;
    ONNXTensorElementDataType type;
    Dims dims;
  };
  std::string file;
  std::vector<Port> inputs;
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

struct Contract {
  /// Reads a file; throws ContractError.
  static Contract read(const std::filesystem::path& file);
  /// Reads its text.
  static Contract parse(std::string_view text);

  std::string model;
  std::vector<File> files;
  std::optional<Call> encode, embed;
  Call prefill, decode;
  std::vector<Slot> slots;
  std::optional<Input> source;
  /// Token ids are smaller than `vocabulary`, a sequence has at most `context_limit` tokens.
  std::optional<std::int64_t> vocabulary, context_limit;
  /// The number of sequences, where the graph takes one number only.
  std::optional<std::size_t> batch;
  bool one_token, capacity_is_chosen, pads, chunks, rewinds, reorders;
  /// Token ids whose places are for images or audio, which this program does not take.
  std::vector<std::int64_t> placeholders;
  Generation generation;

  /// Those of encode, embed, prefill and decode that the model has.
  std::vector<const Call*> calls() const;
  /// Whether the source is ids.
  bool source_is_ids() const;
};

}  // namespace decode_loop
