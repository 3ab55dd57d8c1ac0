// Runs an ONNX decoder with a KV cache as its contract.json says.
//
//     Ort::Env env;  // one for the process, whatever it runs
//     decode_loop::Decoder decoder(env, "path/to/the/model", decode_loop::Contract::read("contract.json"));
//     decode_loop::Generation generation = decoder.contract().generation;
//     generation.most = 100;
//     decode_loop::Sampler sampler({.temperature = 0.8F, .top_p = 0.95F});
//     const auto made = decoder.generate({{5, 6, 7}}, generation, sampler);
#pragma once

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "decode_loop/contract.hpp"
#include "decode_loop/tensors.hpp"

namespace decode_loop {

/// Token ids, a list for each sequence of the batch.
using Tokens = std::vector<std::vector<std::int64_t>>;

/// The logits of a call, where the runtime left them. Spans are valid as long as it is there.
class Logits {
 public:
  Logits(Ort::Value value, std::size_t batch);

  /// The number of sequences.
  std::size_t rows() const { return rows_; }
  /// How many new tokens of a sequence have logits: all of the call, or the last one alone.
  std::size_t tokens() const { return tokens_; }
  /// What comes after the last token of a sequence: a logit for each id.
  std::span<const float> last(std::size_t row) const { return after(row, tokens_ - 1); }
  /// What comes after a new token of a sequence. Float32 is not copied.
  std::span<const float> after(std::size_t row, std::size_t token) const;

 private:
  Ort::Value value_;
  std::size_t rows_, tokens_, width_;
  mutable std::map<std::size_t, std::vector<float>> converted_;
};

/// A new token of a sequence.
struct Token {
  std::size_t row;
  std::int64_t id;
};
/// Chooses a token of its row of logits and the tokens of its sequence so far, the prompt among them.
using Choose = std::function<std::int64_t(std::span<const float> logits, std::span<const std::int64_t> tokens)>;
/// Is called for each new token; false stops the generation.
using OnToken = std::function<bool(Token)>;

/// Takes each call as a line of JSON: kvdoctor step-test MODEL --trace FILE.
using Trace = std::function<void(const std::string& line)>;

/// The likeliest token is taken at the temperature 0. What is not changed has no effect.
struct Sampling {
  float temperature = 0;
  /// Only so many of the likeliest tokens; 0 takes all.
  std::size_t top_k = 0;
  /// Only the likeliest tokens that have this probability together.
  float top_p = 1;
  /// Only tokens with this part of the probability of the likeliest one.
  float min_p = 0;
  /// Logits of tokens that are there already are divided by it where they are positive, else multiplied.
  float repetition_penalty = 1;
  std::uint64_t seed = 0;
};

/// Chooses tokens at random; the same seed gives the same tokens.
class Sampler {
 public:
  explicit Sampler(const Sampling& sampling) : sampling_(sampling), random_(sampling.seed) {}

  /// The next token, of a row of logits and the tokens so far.
  std::int64_t operator()(std::span<const float> logits, std::span<const std::int64_t> tokens);

 private:
  Sampling sampling_;
  std::mt19937_64 random_;
};

/// The token with the largest logit, and the first of them where several are as large.
std::int64_t likeliest(std::span<const float> logits);

class Stream;

/// A model, and the cache of one batch of sequences. It serves one thread at a time.
///
/// The cache goes from step to step as handles of the runtime. Only the parts that the contract lets the loop put
/// together, and those that `rewind` and `reorder` change, are copied. Errors are thrown: Ort::Exception by the
/// runtime, ContractError, std::invalid_argument for what cannot be right, std::logic_error for a call that comes too
/// early. The decoder is then as it was; only a `prefill` that the runtime refuses leaves no sequences.
class Decoder {
 public:
  /// Opens the files in a folder. `env` must outlive the decoder; `capacity` is the room of the cache in tokens, where
  /// the contract leaves it to the caller.
  Decoder(const Ort::Env& env, const std::filesystem::path& folder, Contract contract,
          const Ort::SessionOptions& options = Ort::SessionOptions{}, std::int64_t capacity = 512);

  const Contract& contract() const { return *contract_; }
  /// Tokens in the cache, padding counted.
  std::int64_t length() const { return state_.length; }
  /// The most tokens that a sequence may have.
  std::int64_t limit() const {
    return contract_->capacity_is_chosen ? std::min(capacity_, contract_->longest) : contract_->longest;
  }
  /// Writes down the calls from now on; without a function no longer.
  void trace_to(Trace trace) { trace_ = std::move(trace); }
  /// Begins anew: no sequences, and nothing encoded.
  void reset() { state_ = State{}; }

  /// Says what the sequences are about with ids, a row for each; shorter ones are padded on the right and masked.
  void encode(const Tokens& sources);
  /// Says it with the elements of a tensor, as features or encoder states are. The mask has a row for each sequence,
  /// with 0 for padding on the right; without it all of the source is read.
  void encode(std::span<const float> values, const Shape& shape, const Tokens& mask = {});
  /// Begins sequences with their prompts; shorter ones are padded on the left where the contract allows it.
  Logits prefill(const Tokens& prompts);
  /// Continues each sequence with new tokens, the same number of each.
  Logits step(const Tokens& tokens);
  /// Forgets the last tokens of every sequence. At least one must stay.
  void rewind(std::int64_t count);
  /// Makes row i of the batch a copy of what row `rows[i]` was, as a beam search needs it.
  void reorder(std::span<const std::size_t> rows);

  /// Generates from the logits of `prefill` or `step`, token by token. `sequences` are the tokens so far.
  Stream stream(Logits logits, Tokens sequences, Generation generation, Choose choose = {});
  /// Generates until every sequence has ended; returns the new tokens of each. Without `choose` the likeliest are
  /// taken. A stop that is requested ends it, also within a call of the runtime.
  Tokens generate(const Tokens& prompts, const Generation& generation, const Choose& choose = {},
                  const OnToken& on_token = {}, const std::stop_token& stop = {});

 private:
  using Values = std::map<std::string, Ort::Value, std::less<>>;
  using Sizes = std::map<std::string, double, std::less<>>;
  // What the calls of a batch of sequences depend on.
  struct State {
    std::int64_t length = 0;
    std::vector<std::int64_t> padding;  // of each sequence, on the left
    Values cache;                       // what is fed next; where there is none it is the encoded value
    Values encoded;                     // the source, and what the encoder made of it: they outlive the sequences
    Tokens mask;                        // of the source, in the order of the sequences
    Tokens source_mask;
  };

  void encode_elements(const Shape& shape, const Elements& at, Tokens mask);
  void check_tokens(const Tokens& rows, std::int64_t total, const std::vector<std::int64_t>& padding) const;
  Logits advance(const Tokens& tokens);
  std::optional<Logits> run(const std::string& phase, const Tokens& tokens);
  Values run_session(const Call& call, const Tokens& tokens);
  Sizes sizes_of(const Tokens& tokens) const;
  Ort::Value make(const Made& made, Sizes sizes, const Tokens& tokens) const;
  const Ort::Value& value(const std::string& name) const;
  void take(const std::vector<Take>& takes, Values made);
  std::optional<Ort::Value> next_value(const Take& take, Ort::Value made);
  void replace(Values next);
  void clear();

  std::shared_ptr<const Contract> contract_;
  std::map<std::string, Ort::Session> sessions_;
  Ort::RunOptions run_options_;
  Trace trace_;
  std::int64_t capacity_;
  State state_;
};

/// Generates tokens step by step. Whoever leaves it stops there: the tokens of the last step are then not in the cache
/// yet, and the next step of the decoder feeds them.
class Stream {
 public:
  /// The next token of each sequence that has not ended; empty where all have.
  std::vector<Token> next();
  /// The new tokens of each sequence so far.
  Tokens made() const;

 private:
  friend class Decoder;
  Stream(Decoder& decoder, Logits logits, Tokens sequences, Generation generation, Choose choose);
  std::int64_t choose(std::size_t row, std::span<const float> logits) const;

  Decoder& decoder_;
  std::optional<Logits> logits_;
  Tokens sequences_;
  std::vector<std::size_t> begins_;
  std::vector<bool> running_;
  Generation generation_;
  Choose choose_;
};

}  // namespace decode_loop
