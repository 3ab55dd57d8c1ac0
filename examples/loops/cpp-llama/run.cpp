#include "run.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <system_error>

namespace {

// The tokens of a step: one of each sequence.
Tokens column(const Tokens& rows, std::size_t position) {
  Tokens tokens;
  for (const Ids& row : rows) tokens.push_back({row[position]});
  return tokens;
}

Ids likeliest_of(const Logits& logits) {
  Ids tokens;
  for (const auto& row : logits) tokens.push_back(likeliest(row));
  return tokens;
}

std::vector<std::string> parse_self_tests(std::string_view text) {
  std::vector<std::string> tests;
  while (!text.empty()) {
    const std::string_view name = text.substr(0, text.find(','));
    if (name != "rewind" && name != "reorder") {
      throw UsageError("--self-test knows rewind and reorder, not '" + std::string(name) + "'");
    }
    tests.emplace_back(name);
    text.remove_prefix(std::min(text.size(), name.size() + 1));
  }
  return tests;
}

void compare(std::string_view name, const Logits& logits, const Ids& expected) {
  const Ids got = likeliest_of(logits);
  if (got != expected) {
    throw std::runtime_error(std::string(name) + ": " + join(got) + " in place of " + join(expected));
  }
}

// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
void self_test(Decoder& decoder, const Run& run, const Tokens& made) {
  const Tokens last = column(run.follow, run.follow.front().size() - 1);
  Ids expected;
  for (const Ids& row : made) expected.push_back(row.back());
  if (std::ranges::find(run.self_tests, "rewind") != run.self_tests.end()) {
    decoder.rewind(1);
    compare("rewind", decoder.step(last), expected);
  }
  if (std::ranges::find(run.self_tests, "reorder") != run.self_tests.end()) {
    decoder.rewind(1);
    std::vector<std::size_t> order(last.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    order.push_back(0);  // the rows backwards, and the first one once more
    decoder.reorder(order);
    Tokens tokens;
    Ids expected_then;
    for (const std::size_t row : order) {
      tokens.push_back(last[row]);
      expected_then.push_back(expected[row]);
    }
    compare("reorder", decoder.step(tokens), expected_then);
  }
}

}  // namespace

bool read_option(Run& run, std::string_view option, std::string_view value) {
  if (option == "--prompt") {
    run.prompts.push_back(parse_ids(value));
  } else if (option == "--follow") {
    run.follow.push_back(parse_ids(value));
  } else if (option == "--self-test") {
    run.self_tests = parse_self_tests(value);
  } else {
    return false;
  }
  return true;
}

void check(const Run& run) {
  if (run.prompts.empty()) throw UsageError("--prompt is missing");
  for (const Ids& row : run.follow) {
    if (run.follow.size() != run.prompts.size() || row.size() != run.follow.front().size()) {
      throw UsageError("--follow is given once for each prompt, always with as many ids");
    }
  }
  if (!run.self_tests.empty() && (run.follow.empty() || run.follow.front().empty())) {
    throw UsageError("--self-test needs tokens to --follow");
  }
}

Tokens follow(Decoder& decoder, const Run& run, const std::function<void()>& on_step) {
  Tokens made(run.prompts.size());
  const auto keep = [&](const Logits& logits) {
    if (on_step) on_step();
    for (std::size_t row = 0; row < made.size(); ++row) made[row].push_back(likeliest(logits[row]));
  };
  keep(decoder.prefill(run.prompts));
  const std::size_t steps = run.follow.empty() ? 0 : run.follow.front().size();
  for (std::size_t i = 0; i < steps; ++i) keep(decoder.step(column(run.follow, i)));
  if (!run.self_tests.empty()) self_test(decoder, run, made);
  return made;
}

Ids parse_ids(std::string_view text) {
  Ids ids;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    std::int64_t id = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), id);
    if (!part.empty() && (error != std::errc{} || end != part.data() + part.size())) {
      throw UsageError("'" + std::string(part) + "' is not an integer that fits here");
    }
    if (!part.empty()) ids.push_back(id);
    text.remove_prefix(std::min(text.size(), part.size() + 1));
  }
  return ids;
}

std::string join(const Ids& ids) {
  std::string text;
  for (const std::int64_t id : ids) {
    if (!text.empty()) text += ',';
    text += std::to_string(id);
  }
  return text;
}
