// What the program decodes in one run: given on the command line, or in a line of a probe file.

#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "decoder.hpp"

using Ids = std::vector<std::int64_t>;

/// Arguments that cannot be right.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Run {
  Tokens prompts;
  // What each sequence continues with, whatever is likeliest; none where the model chooses.
  Tokens follow;
  std::vector<std::string> self_tests;
};

/// Reads an option of a run; false where it is an option of something else.
bool read_option(Run& run, std::string_view option, std::string_view value);

/// Refuses a run that lacks something.
void check(const Run& run);

/// The likeliest token after the prompt and after each given one, whatever was likeliest before.
///
/// Then come the self-tests: the last step is taken again, and an error is thrown where other tokens are likeliest.
Tokens follow(Decoder& decoder, const Run& run, const std::function<void()>& on_step = {});

/// Token ids with commas between them.
Ids parse_ids(std::string_view text);

std::string join(const Ids& ids);
