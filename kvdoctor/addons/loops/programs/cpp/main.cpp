// Decodes from the command line: token ids in, token ids out. `decode --help` lists the options.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_loop/decoder.hpp"

namespace {

using namespace decode_loop;
using nlohmann::json;
using Path = std::filesystem::path;

constexpr std::string_view kSchema = "kvdoctor/loop-vectors/2";
constexpr std::string_view kUsage = R"(Token ids in, token ids out.

  --model FOLDER    folder of the model files
  --contract FILE   its contract (contract.json of this project)
  --provider NAME   execution provider (CPUExecutionProvider)
  --calls JSON      calls: [{"call": "generate", "rows": [[5, 6, 7]], "most": 20}]
  --runs FILE       without --calls: runs to play (vectors.json next to the contract)
  --record FILE     write a trace for kvdoctor step-test --trace
)";

Ort::SessionOptions session_options(const std::string& provider) {
  const std::vector<std::string> available = Ort::GetAvailableProviders();
  require(std::ranges::find(available, provider) != available.end(),
          "there is no provider " + provider + " in this ONNX Runtime; it has " + json(available).dump());
  Ort::SessionOptions options;
  if (provider == "CUDAExecutionProvider") {
    options.AppendExecutionProvider_CUDA(OrtCUDAProviderOptions{});
  } else if (provider == "TensorrtExecutionProvider") {
    options.AppendExecutionProvider_TensorRT(OrtTensorRTProviderOptions{});
  } else if (provider != "CPUExecutionProvider") {
    options.AppendExecutionProvider(provider);
  }
  return options;
}

std::string read(const Path& file) {
  std::ifstream stream(file, std::ios::binary);
  require(stream.good(), file.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

Tokens likeliest_of(const Logits& logits) {
  Tokens tokens;
  for (std::size_t row = 0; row < logits.rows(); ++row) tokens.push_back({likeliest(logits.last(row))});
  return tokens;
}

/// A number of a call that is not below 0.
std::size_t count(const json& call, const char* name, std::int64_t otherwise) {
  const std::int64_t number = call.value(name, otherwise);
  require(number >= 0, std::string(name) + " is 0 or more");
  return static_cast<std::size_t>(number);
}

Tokens generate(Decoder& decoder, const json& call) {
  Generation generation = decoder.contract().generation;
  generation.most = count(call, "most", 20);
  generation.end = call.value("stop", generation.end);
  const float temperature = call.value("temperature", 0.0F);
  require(temperature >= 0, "temperature is 0 or more");
  Sampler sampler({.temperature = temperature,
                   .top_k = count(call, "top_k", 0),
                   .top_p = call.value("top_p", 1.0F),
                   .min_p = call.value("min_p", 0.0F),
                   .repetition_penalty = call.value("repetition_penalty", 1.0F),
                   .seed = call.value("seed", std::uint64_t{0})});
  return decoder.generate(call.at("rows"), generation, sampler);
}

/// What each call takes.
const std::map<std::string, std::vector<std::string>> kKeys{
    {"encode", {"rows"}},
    {"encode-file", {"file", "shape"}},
    {"prefill", {"rows"}},
    {"step", {"rows"}},
    {"rewind", {"count"}},
    {"reorder", {"order"}},
    {"generate", {"rows", "most", "stop", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}},
};

/// Refuses a call with a key that nothing reads.
void check_keys(const json& call) {
  const std::string kind = call.at("call");
  const auto known = kKeys.find(kind);
  require(known != kKeys.end(), "there is no call " + kind);
  for (const auto& [key, value] : call.items()) {
    const bool read = key == "call" || key == "expect" || std::ranges::find(known->second, key) != known->second.end();
    require(read, "the call " + kind + " takes no " + key);
  }
}

/// Makes a call of a run: the tokens of each sequence that it generates, or the likeliest one after it. A file has
/// float32, little endian.
Tokens make(Decoder& decoder, const json& call, const Path& folder) {
  check_keys(call);
  const std::string kind = call.at("call");
  if (kind == "prefill") return likeliest_of(decoder.prefill(call.at("rows")));
  if (kind == "step") return likeliest_of(decoder.step(call.at("rows")));
  if (kind == "generate") return generate(decoder, call);
  if (kind == "encode") {
    decoder.encode(call.at("rows").get<Tokens>());
  } else if (kind == "rewind") {
    decoder.rewind(call.at("count"));
  } else if (kind == "reorder") {
    decoder.reorder(call.at("order").get<std::vector<std::size_t>>());
  } else {
    const std::string bytes = read(folder / call.at("file").get<std::string>());
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    decoder.encode(values, call.at("shape"));
  }
  return {};
}

/// Makes the calls of a run: the likeliest tokens after each that expects some, and a text if they are others, where
/// -1 is any.
std::string follow(Decoder& decoder, const json& calls, const Path& folder, Tokens& made) {
  std::string problem;
  for (const json& call : calls) {
    std::vector<std::int64_t> tokens;
    for (const auto& row : make(decoder, call, folder)) tokens.insert(tokens.end(), row.begin(), row.end());
    if (!call.contains("expect")) continue;
    const auto expect = call.at("expect").get<std::vector<std::int64_t>>();
    const auto fits = [](std::int64_t token, std::int64_t due) { return due < 0 || token == due; };
    if (problem.empty() && !std::ranges::equal(tokens, expect, fits)) {
      problem =
          "step " + std::to_string(made.size()) + ": " + json(tokens).dump() + " in place of " + json(expect).dump();
    }
    made.push_back(tokens);
  }
  return problem;
}

/// Plays all runs of a file, and writes the trace; whether all tokens are as expected.
bool play(Decoder& decoder, const Path& runs, std::ostream& lines) {
  const json vectors = json::parse(read(runs));
  require(vectors.at("schema") == kSchema, runs.string() + " has no runs of the schema " + std::string(kSchema));
  lines << vectors << std::endl;  // the runs that are due
  bool all = true;
  for (const json& run : vectors.at("runs")) {
    json ended{{"run", run.at("name")}, {"error", nullptr}};
    decoder.reset();
    decoder.trace_to([&](const std::string& line) {
      lines << "{\"run\":" << run.at("name") << ',' << std::string_view(line).substr(1) << std::endl;
    });
    Tokens tokens;
    std::string problem;
    try {
      problem = follow(decoder, run.at("calls"), runs.parent_path(), tokens);
    } catch (const std::exception& raised) {
      ended["error"] = raised.what();
      problem = std::string("error: ") + raised.what();
    }
    ended["tokens"] = tokens;
    lines << ended.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
    std::cout << run.at("name").get<std::string>() << ": " << (problem.empty() ? "as expected" : problem) << '\n';
    all = all && problem.empty();
  }
  decoder.trace_to({});
  return all;
}

/// Tokens go to standard output, a line for each sequence; whether those of runs are as expected.
bool decode(const std::vector<std::string>& arguments) {
  std::map<std::string, std::string> given{{"--provider", "CPUExecutionProvider"},
                                           {"--contract", PROJECT_FOLDER "/contract.json"}};
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const bool known = kUsage.find("\n  " + arguments[i] + " ") != std::string_view::npos;
    require(known && i + 1 < arguments.size(), "not an option with a value: " + arguments[i]);
    given[arguments[i]] = arguments[i + 1];
  }
  require(given.contains("--model"), std::string(kUsage));
  const Ort::Env env;
  Decoder decoder(env, given["--model"], Contract::read(given["--contract"]), session_options(given["--provider"]));
  std::ofstream lines;
  if (given.contains("--record")) {
    lines.open(given["--record"]);
    require(lines.good(), given["--record"] + " cannot be written");
  }
  if (!given.contains("--calls")) {
    const Path next_to = Path(given["--contract"]).replace_filename("vectors.json");
    return play(decoder, given.contains("--runs") ? Path(given["--runs"]) : next_to, lines);
  }
  if (lines.is_open()) decoder.trace_to([&lines](const std::string& line) { lines << line << std::endl; });
  for (const json& call : json::parse(given["--calls"])) {
    for (const auto& row : make(decoder, call, {})) {
      for (std::size_t i = 0; i < row.size(); ++i) std::cout << (i > 0 ? "," : "") << row[i];
      std::cout << '\n';
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::ranges::find(arguments, "--help") != arguments.end()) {
    std::cout << kUsage;
    return 0;
  }
  return decode(arguments) ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
