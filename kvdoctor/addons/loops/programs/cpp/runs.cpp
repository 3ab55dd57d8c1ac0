#include "runs.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

namespace decode_loop {

namespace {

using nlohmann::json;

constexpr std::string_view kSchema = "kvdoctor/loop-vectors/1";

std::string read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::invalid_argument(file.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

void encode(Decoder& decoder, const json& source, const std::filesystem::path& folder) {
  if (source.is_array()) decoder.encode(source.get<Tokens>());
  if (source.is_object()) encode_file(decoder, folder / source.at("file").get<std::string>(), source.at("shape"));
}

std::vector<std::int64_t> likeliest_of(const Logits& logits) {
  std::vector<std::int64_t> made;
  for (std::size_t row = 0; row < logits.rows(); ++row) made.push_back(likeliest(logits.last(row)));
  return made;
}

/// The likeliest token after the prompt and after each id to follow, whatever was likeliest.
Tokens follow(Decoder& decoder, const Tokens& prompts, const Tokens& ids) {
  Tokens made(prompts.size());
  for (std::size_t step = 0; step <= ids.at(0).size(); ++step) {
    Tokens fed;
    for (std::size_t row = 0; step > 0 && row < ids.size(); ++row) fed.push_back({ids[row].at(step - 1)});
    const auto found = likeliest_of(step > 0 ? decoder.step(fed) : decoder.prefill(prompts));
    for (std::size_t row = 0; row < made.size(); ++row) made[row].push_back(found[row]);
  }
  return made;
}

/// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
void try_again(Decoder& decoder, const std::string& test, const Tokens& ids, const Tokens& made) {
  std::vector<std::size_t> order(made.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  decoder.rewind(1);
  if (test == "reorder") {
    std::ranges::reverse(order);
    order.push_back(0);  // backwards, and the first once more
    decoder.reorder(order);
  }
  Tokens last;
  std::vector<std::int64_t> expected;
  for (const std::size_t row : order) {
    last.push_back({ids[row].back()});
    expected.push_back(made[row].back());
  }
  const auto got = likeliest_of(decoder.step(last));
  if (got != expected) {
    throw std::runtime_error(test + ": [" + listed(got) + "] in place of [" + listed(expected) + "]");
  }
}

/// The first token that is not as expected, -1 being any; empty where all are.
std::string difference(const Tokens& expect, const Tokens& tokens) {
  for (std::size_t row = 0; row < expect.size(); ++row) {
    for (std::size_t step = 0; step < expect[row].size(); ++step) {
      const std::int64_t due = expect[row][step], token = tokens.at(row).at(step);
      if (due >= 0 && token != due) {
        return "sequence " + std::to_string(row) + ", step " + std::to_string(step) + ": token " +
               std::to_string(token) + " in place of " + std::to_string(due);
      }
    }
  }
  return {};
}

}  // namespace

void encode_file(Decoder& decoder, const std::filesystem::path& file, const Shape& shape) {
  const std::string bytes = read(file);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  decoder.encode(values, shape);
}

bool play(Decoder& decoder, const std::filesystem::path& runs, const std::filesystem::path& file) {
  const json vectors = json::parse(read(runs));
  if (vectors.at("schema") != kSchema) {
    throw std::invalid_argument(runs.string() + " has no runs of the schema " + std::string(kSchema));
  }
  if (std::filesystem::exists(file) && std::filesystem::equivalent(file, runs)) {
    throw std::invalid_argument("--record is the file of --runs itself");
  }
  std::ofstream lines(file);
  lines << vectors << std::endl;  // the runs that are due
  bool all = true;
  for (const json& run : vectors.at("runs")) {
    const auto name = run.at("name").get<std::string>();
    const auto ids = run.at("follow").get<Tokens>();
    Tokens tokens;
    std::string error;
    decoder.reset();
    decoder.trace_to([&](const std::string& line) {
      lines << "{\"run\":" << json(name) << ',' << std::string_view(line).substr(1) << std::endl;
    });
    try {
      encode(decoder, run.at("source"), runs.parent_path());
      tokens = follow(decoder, run.at("prompts").get<Tokens>(), ids);
      if (!run.at("self_test").is_null()) try_again(decoder, run.at("self_test"), ids, tokens);
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    json ended{{"run", name}, {"tokens", tokens}, {"error", nullptr}};
    if (!error.empty()) ended["error"] = error;
    lines << ended.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
    if (!lines) throw std::runtime_error(file.string() + " cannot be written");
    const std::string problem = error.empty() ? difference(run.at("expect").get<Tokens>(), tokens) : "error: " + error;
    std::cout << name << ": " << (problem.empty() ? "as expected" : problem) << '\n';
    all = all && problem.empty();
  }
  decoder.trace_to({});
  return all;
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
