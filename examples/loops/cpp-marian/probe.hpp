// Runs that were prepared elsewhere: each is decoded here, and compared with the tokens that are expected.

#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "decoder.hpp"
#include "run.hpp"

/// A line of a probe file.
struct ProbeRun {
  std::string name;
  Run run;
  // A token after the prompt and after each followed one, for each sequence; -1 where any token is right.
  Tokens expect;
};

/// The runs of a probe file: on each line the arguments of one, with a space between them.
std::vector<ProbeRun> read_probe(const std::filesystem::path& file);

/// Decodes each run and adds its calls and its tokens to a file. Returns whether all tokens are the expected ones.
bool probe(Decoder& decoder, const std::vector<ProbeRun>& runs, const std::filesystem::path& result);
