#include "runs.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include "decode_loop/json.hpp"

namespace decode_loop {

namespace {

std::string read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::invalid_argument(file.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

Tokens tokens_of(const Json& json) {
  Tokens made;
  if (json.is_null()) return made;
  for (const Json& row : json.list()) made.push_back(row.integers());
  return made;
}

Run run_of(const Json& json, const std::filesystem::path& folder) {
  Run run{.name = json.at("name").text(),
          .prompts = tokens_of(json.at("prompts")),
          .follow = tokens_of(json.get("follow")),
          .sources = {},
          .source_file = {},
          .source_shape = {},
          .expect = tokens_of(json.at("expect")),
          .self_tests = {}};
  const Json& source = json.get("source");
  if (source.is_list()) {
    run.sources = tokens_of(source);
  } else if (!source.is_null()) {
    run.source_file = folder / source.at("file").text();
    run.source_shape = source.at("shape").integers();
  }
  if (const Json& test = json.get("self_test"); !test.is_null()) run.self_tests.push_back(test.text());
  return run;
}

std::vector<std::int64_t> likeliest_of(const Logits& logits) {
  std::vector<std::int64_t> made;
  for (std::size_t row = 0; row < logits.rows(); ++row) made.push_back(likeliest(logits.last(row)));
  return made;
}

/// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
void try_again(const std::string& test, const Run& run, Decoder& decoder, const Tokens& made) {
  if (run.follow.empty() || run.follow[0].empty()) throw std::invalid_argument("a self-test needs ids to follow");
  if (test != "rewind" && test != "reorder") {
    throw std::invalid_argument("--self-test has rewind and reorder, not " + test);
  }
  std::vector<std::size_t> order(made.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  decoder.rewind(1);
  if (test == "reorder") {
    std::reverse(order.begin(), order.end());
    order.push_back(0);  // backwards, and the first once more
    decoder.reorder(order);
  }
  Tokens last;
  std::vector<std::int64_t> expected;
  for (const std::size_t row : order) {
    last.push_back({run.follow[row].back()});
    expected.push_back(made[row].back());
  }
  const auto got = likeliest_of(decoder.step(last));
  if (got != expected) {
    throw std::runtime_error(test + ": [" + listed(got) + "] in place of [" + listed(expected) + "]");
  }
}

/// The first token that is not as expected; empty where all are.
std::string difference(const Run& run, const Tokens& tokens) {
  for (std::size_t row = 0; row < run.expect.size(); ++row) {
    const std::string place = "sequence " + std::to_string(row);
    const std::size_t count = row < tokens.size() ? tokens[row].size() : 0;
    if (count != run.expect[row].size()) {
      return place + ": " + std::to_string(count) + " tokens in place of " + std::to_string(run.expect[row].size());
    }
    for (std::size_t step = 0; step < count; ++step) {
      const std::int64_t due = run.expect[row][step];
      if (due >= 0 && tokens[row][step] != due) {
        return place + ", step " + std::to_string(step) + ": token " + std::to_string(tokens[row][step]) +
               " in place of " + std::to_string(due);
      }
    }
  }
  return {};
}

}  // namespace

void Run::encode(Decoder& decoder) const {
  if (!sources.empty()) decoder.encode(sources);
  if (source_file.empty()) return;
  const std::string bytes = read(source_file);
  std::vector<float> values(bytes.size() / sizeof(float));
  if (values.size() * sizeof(float) != bytes.size()) {
    throw std::invalid_argument(source_file.string() + ": " + std::to_string(bytes.size()) + " bytes are not float32");
  }
  std::memcpy(values.data(), bytes.data(), bytes.size());
  decoder.encode(values, source_shape);
}

Tokens Run::decode(Decoder& decoder, const std::function<void()>& on_step) const {
  const std::size_t steps = follow.empty() ? 0 : follow[0].size();
  const auto unequal = [steps](const auto& row) { return row.size() != steps; };
  if (std::any_of(follow.begin(), follow.end(), unequal) || (!follow.empty() && follow.size() != prompts.size())) {
    throw std::invalid_argument("give --follow once for each --prompt, with ids of the same number");
  }
  Tokens made(prompts.size());
  for (std::size_t step = 0; step <= steps; ++step) {
    Tokens fed;
    for (std::size_t row = 0; step > 0 && row < follow.size(); ++row) fed.push_back({follow[row][step - 1]});
    const auto found = likeliest_of(step > 0 ? decoder.step(fed) : decoder.prefill(prompts));
    on_step();
    for (std::size_t row = 0; row < made.size(); ++row) made[row].push_back(found[row]);
  }
  for (const std::string& test : self_tests) try_again(test, *this, decoder, made);
  return made;
}

bool record(Decoder& decoder, const std::filesystem::path& runs, const std::filesystem::path& file) {
  constexpr std::string_view kSchema = "kvdoctor/loop-vectors/1";
  std::string text = read(runs);
  const Json vectors = Json::parse(text);
  if (vectors.at("schema").text() != kSchema) {
    throw std::invalid_argument(runs.string() + ": the schema is " + vectors.at("schema").text() + ", not " +
                                std::string(kSchema));
  }
  if (std::filesystem::exists(file) && std::filesystem::equivalent(file, runs)) {
    throw std::invalid_argument("--record is the file of --runs itself");
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::ofstream(file, std::ios::trunc) << text << '\n';  // the runs that are due
  bool all = true;
  for (const Json& one : vectors.at("runs").list()) {
    const Run run = run_of(one, runs.parent_path());
    Tokens tokens;
    std::string error;
    decoder.reset();
    decoder.trace_to({file, run.name});
    try {
      run.encode(decoder);
      tokens = run.decode(decoder, [] {});
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    decoder.trace_to({});
    std::ofstream lines(file, std::ios::app);
    lines << "{\"run\":";
    write_json(lines, run.name);
    lines << ",\"tokens\":[";
    for (std::size_t row = 0; row < tokens.size(); ++row) lines << (row ? ",[" : "[") << listed(tokens[row]) << ']';
    lines << "],\"error\":";
    error.empty() ? void(lines << "null") : write_json(lines, error);
    lines << "}\n";
    if (!lines) throw std::runtime_error(file.string() + " cannot be written");
    const std::string problem = error.empty() ? difference(run, tokens) : "error: " + error;
    std::cout << run.name << ": " << (problem.empty() ? "as expected" : problem) << '\n';
    all = all && problem.empty();
  }
  return all;
}

std::vector<std::int64_t> numbers(const std::string& name, const std::string& text) {
  std::vector<std::int64_t> made;
  for (const char *at = text.data(), *end = at + text.size(); at < end; ++at) {
    const auto [rest, error] = std::from_chars(at, end, made.emplace_back());
    if (error != std::errc{} || (rest < end && *rest != ',')) {
      throw std::invalid_argument(name + " " + text + ": these are not numbers with commas");
    }
    at = rest;
  }
  return made;
}

std::string listed(const std::vector<std::int64_t>& numbers) {
  std::string made;
  for (const std::int64_t number : numbers) {
    if (!made.empty()) made += ',';
    made += std::to_string(number);
  }
  return made;
}

}  // namespace decode_loop
