// The decode loop of marian-4.57.6
// (layout optimum-merged), written by kvdoctor 0.1.0.
//
//     Decoder decoder("path/to/the/model");
//     decoder.encode(source);
//     Tokens tokens = decoder.generate({{5, 6, 7}}, 20);
//
// All names, types and sizes are those of the cache contract of this model; README.md says it in words.

#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trace.hpp"

/// Token ids, a list for each sequence of the batch.
using Tokens = std::vector<std::vector<std::int64_t>>;
/// The logits of the next token, a list for each sequence of the batch.
using Logits = std::vector<std::vector<float>>;
/// Picks a token of the logits of a sequence.
using Choose = std::function<std::int64_t(std::span<const float> logits)>;
/// Is called for each new token.
using OnToken = std::function<void(std::size_t row, std::int64_t token)>;

/// What the sequences are about: int64[batch, encoder_input].
struct Source {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> entries;
};

/// The model, and the cache of one batch of sequences.
///
/// The cache goes from step to step as handles of the runtime, without a copy.
/// A value is released as soon as the next step has replaced it. Errors are thrown: Ort::Exception by the runtime,
/// std::invalid_argument and std::logic_error for arguments and calls that cannot be right.
class Decoder {
 public:
  /// Opens the files in `folder`.
  explicit Decoder(const std::filesystem::path& folder, const Ort::SessionOptions& options = Ort::SessionOptions{});

  /// Tokens in the cache, padding counted.
  std::int64_t length() const { return length_; }

  /// The most tokens that a sequence may have.
  std::int64_t most_tokens() const;

  /// Writes each later call into a file, as the variable KVDOCTOR_TRACE does.
  void trace_to(Trace trace) { trace_ = std::move(trace); }

  /// Begins anew: no sequences, and nothing encoded.
  void reset();

  /// Runs the encoder; the sequences after it are about this `source`.
  /// `mask` has 0 for padding on the right, in a row for each sequence; without it all of the source is read.
  void encode(const Source& source, const Tokens& mask = {});

  /// Begins sequences with their prompts.
  Logits prefill(const Tokens& prompts);

  /// Continues each sequence with its new tokens.
  Logits step(const Tokens& tokens);

  /// Forgets the last `count` tokens of every sequence. At least one token must stay.
  void rewind(std::int64_t count);

  /// Makes row i of the batch a copy of what row `rows[i]` was, as a beam search needs it.
  void reorder(std::span<const std::size_t> rows);

  /// Decodes until every sequence has ended, at most `most` tokens; returns the new tokens of each without the one of
  /// `stop` that ended it. `choose` picks each token; without it the likeliest is taken.
  /// It ends as well where the sequences are as long as they may be.
  Tokens generate(const Tokens& prompts, std::size_t most = 20, std::span<const std::int64_t> stop = {},
                  const Choose& choose = {}, const OnToken& on_token = {});

 private:
  using Values = std::unordered_map<std::string_view, Ort::Value>;

  // The inputs of one call. Values are borrowed from the decoder, but for those of this call alone.
  struct Feeds {
    std::vector<const char*> names;
    std::vector<const OrtValue*> values;
    std::vector<Ort::Value> own;

    void add(const char* name, Ort::Value value);
    void borrow(const char* name, const Ort::Value& value);
  };

  void clear();
  Logits advance(const Tokens& tokens);
  Feeds feeds(const Tokens& tokens) const;
  void fill_first(std::int64_t batch);
  std::int64_t states() const;
  Values run(Ort::Session& session, const char* file, const Feeds& fed, std::span<const char* const> names) const;

  Ort::Env env_{ORT_LOGGING_LEVEL_WARNING, "decoder"};
  Ort::Session encoder_;
  Ort::Session decoder_;
  Trace trace_;  // without a file nothing is written
  std::int64_t length_ = 0;
  std::size_t batch_ = 0;
  // In the order of the slots; an empty handle before the first call.
  std::vector<Ort::Value> cache_;
  // Of the encoder, for all sequences until the next encode().
  Values made_;
  Tokens source_mask_;
  // How many sequences the source is for.
  std::size_t sources_ = 0;
  bool moved_ = false;  // whether the sequences changed places after encode()
};

/// The likeliest token.
std::int64_t likeliest(std::span<const float> logits);
