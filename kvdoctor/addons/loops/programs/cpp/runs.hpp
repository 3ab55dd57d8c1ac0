// What is decoded from the command line, or played from a file of runs with a trace of their calls.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "decode_loop/decoder.hpp"

namespace decode_loop {

/// Prompts, and ids to follow whatever is likeliest.
struct Run {
  std::string name;
  Tokens prompts, follow, sources;
  std::filesystem::path source_file;  // of float32, little endian
  Shape source_shape;
  Tokens expect;                        // the likeliest tokens of each sequence; -1 where any is right
  std::vector<std::string> self_tests;  // what is tried after the last step: rewind, reorder

  /// Gives the source to the decoder.
  void encode(Decoder& decoder) const;
  /// The likeliest token after the prompt and after each id to follow. `on_step` is called after each step.
  Tokens decode(Decoder& decoder, const std::function<void()>& on_step) const;
};

/// Plays all runs of a file, and writes the trace; whether all tokens are as expected.
bool record(Decoder& decoder, const std::filesystem::path& runs, const std::filesystem::path& file);

/// Numbers with commas between them, as text and back.
std::vector<std::int64_t> numbers(const std::string& name, const std::string& text);
std::string listed(const std::vector<std::int64_t>& numbers);

}  // namespace decode_loop
