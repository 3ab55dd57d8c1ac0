#include "probe.hpp"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace {

constexpr std::int64_t kAnyToken = -1;

std::vector<std::string> split(std::string_view line) {
  std::vector<std::string> words;
  while (true) {
    const std::size_t end = line.find(' ');
    words.emplace_back(line.substr(0, end));
    if (end == std::string_view::npos) return words;
    line.remove_prefix(end + 1);
  }
}

ProbeRun parse(std::string_view line) {
  ProbeRun probed;
  const std::vector<std::string> words = split(line);
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const std::string& option = words[i];
    if (i + 1 == words.size()) throw UsageError(option + " needs a value, or is no option");
    const std::string& value = words[i + 1];
    if (option == "--run") {
      probed.name = value;
    } else if (option == "--expect") {
      probed.expect.push_back(parse_ids(value));
    } else if (!read_option(probed.run, option, value)) {
      throw UsageError("unknown option " + option);
    }
  }
  if (probed.name.empty()) throw UsageError("--run is missing");
  check(probed.run);
  const std::size_t steps = probed.run.follow.empty() ? 0 : probed.run.follow.front().size();
  if (probed.expect.size() != probed.run.prompts.size()) throw UsageError("--expect is given once for each prompt");
  for (const Ids& row : probed.expect) {
    if (row.size() != steps + 1) throw UsageError("--expect has one id more than --follow");
  }
  return probed;
}

Tokens decode(Decoder& decoder, const Run& run) {
  decoder.reset();
  encode(decoder, run);
  return follow(decoder, run);
}

// The first token that is not the expected one; nothing where all are.
std::optional<std::string> difference(const Tokens& made, const Tokens& expect) {
  for (std::size_t row = 0; row < expect.size(); ++row) {
    for (std::size_t step = 0; step < expect[row].size(); ++step) {
      const std::int64_t token = made[row][step];
      const std::int64_t expected = expect[row][step];
      if (expected == kAnyToken || token == expected) continue;
      return "sequence " + std::to_string(row) + ", step " + std::to_string(step) + ": token " + std::to_string(token) +
             " in place of " + std::to_string(expected);
    }
  }
  return std::nullopt;
}

void write_result(const std::filesystem::path& file, std::string_view name, const Tokens& tokens,
                  const std::optional<std::string>& error) {
  std::ofstream out(file, std::ios::app);
  out << "{\"run\": ";
  write_json(out, name);
  out << ", \"tokens\": [";
  for (std::size_t row = 0; row < tokens.size(); ++row) out << (row > 0 ? ", [" : "[") << join(tokens[row]) << ']';
  out << "], \"error\": ";
  if (error) {
    write_json(out, *error);
  } else {
    out << "null";
  }
  out << "}\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + file.string());
}

}  // namespace

std::vector<ProbeRun> read_probe(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw UsageError("cannot read " + file.string());
  std::vector<ProbeRun> runs;
  std::size_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    try {
      runs.push_back(parse(line));
    } catch (const UsageError& error) {
      throw UsageError(file.string() + ", line " + std::to_string(number) + ": " + error.what());
    }
  }
  if (runs.empty()) throw UsageError("there is no run in " + file.string());
  return runs;
}

bool probe(Decoder& decoder, const std::vector<ProbeRun>& runs, const std::filesystem::path& result) {
  bool as_expected = true;
  for (const ProbeRun& probed : runs) {
    decoder.trace_to({.file = result, .run = probed.name});
    Tokens tokens;
    std::optional<std::string> error;
    try {
      tokens = decode(decoder, probed.run);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    write_result(result, probed.name, tokens, error);
    const auto wrong = error ? "error: " + *error : difference(tokens, probed.expect);
    std::cout << probed.name << ": " << wrong.value_or("as expected") << std::endl;
    as_expected = as_expected && !wrong;
  }
  return as_expected;
}
