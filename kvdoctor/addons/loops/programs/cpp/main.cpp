// Decodes from the command line: token ids in, token ids out. `decode --help` lists the options.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_loop/decoder.hpp"

namespace {

using namespace decode_loop;
using nlohmann::json;
using Path = std::filesystem::path;

constexpr std::string_view kSchema = "kvdoctor/loop-vectors/2";
constexpr std::string_view kUsage =
    "Token ids in, token ids out.\n\n"
    "  --model FOLDER       folder of the model files\n"
    "  --contract FILE      its contract (contract.json of this project)\n"
    "  --prompt IDS         ids with commas; once a sequence\n"
    "  --source IDS|FILE    ids for the encoder, once a sequence; else a file of its input: float32, little endian\n"
    "  --source-shape SIZES shape of that file, with commas\n"
    "  --most N             the most new tokens (20)\n"
    "  --stop IDS           ids that end a sequence, with commas (those of the contract)\n"
    "  --temperature T      0 takes the likeliest token, otherwise sampled (0)\n"
    "  --top-k N            sample from so many tokens, 0 for all (50)\n"
    "  --top-p P            sample from the likeliest tokens with this probability (1)\n"
    "  --min-p P            sample from tokens with this part of the largest probability (0)\n"
    "  --repetition-penalty X  on tokens that are there already (1)\n"
    "  --seed N             of the sampling (0)\n"
    "  --capacity N         room of the cache in tokens, where the contract leaves it open (512)\n"
    "  --threads N          threads of a session\n"
    "  --provider NAME      execution provider (CPUExecutionProvider)\n"
    "  --record FILE        write a trace for kvdoctor step-test --trace; without a --prompt, of the runs\n"
    "  --runs FILE          runs to play (vectors.json next to the contract)\n";

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

/// The values of each option, in the order in which they were given.
class Options {
 public:
  explicit Options(const std::vector<std::string>& arguments) {
    for (std::size_t i = 0; i < arguments.size(); i += 2) {
      const bool known = kUsage.find("\n  " + arguments[i] + " ") != std::string_view::npos;
      require(known, "there is no option " + arguments[i] + "; --help lists them");
      require(i + 1 < arguments.size(), arguments[i] + " needs a value");
      given_[arguments[i]].push_back(arguments[i + 1]);
    }
  }

  const std::vector<std::string>& all(const std::string& name) { return given_[name]; }

  std::string text(const std::string& name, const std::string& otherwise = {}) {
    return all(name).empty() ? otherwise : all(name).back();
  }

  /// A number that is not below 0.
  template <typename Number>
  Number number(const std::string& name, Number otherwise) {
    if (all(name).empty()) return otherwise;
    std::istringstream stream(text(name));
    const bool read = !text(name).starts_with('-') && stream >> otherwise;
    require(read && stream.peek() == std::istringstream::traits_type::eof(), name + " takes a number that fits");
    return otherwise;
  }

  /// Each value as numbers with commas between them.
  Tokens rows(const std::string& name) try {
    Tokens rows;
    for (const std::string& text : all(name)) rows.push_back(json::parse("[" + text + "]"));
    return rows;
  } catch (const json::exception&) {
    throw std::invalid_argument(name + " takes numbers with commas");
  }

 private:
  std::map<std::string, std::vector<std::string>> given_;
};

Ort::SessionOptions session_options(Options& given) {
  const std::string provider = given.text("--provider", "CPUExecutionProvider");
  const std::vector<std::string> available = Ort::GetAvailableProviders();
  require(std::ranges::find(available, provider) != available.end(),
          "there is no provider " + provider + " in this ONNX Runtime; it has " + json(available).dump());
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(given.number("--threads", 0));
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

/// Makes a call of a run; the logits that it returns. A file has float32, little endian.
std::optional<Logits> make(Decoder& decoder, const json& call, const Path& folder) {
  const std::string kind = call.at("call");
  if (kind == "prefill") return decoder.prefill(call.at("rows"));
  if (kind == "step") return decoder.step(call.at("rows"));
  if (kind == "encode") decoder.encode(call.at("rows").get<Tokens>());
  if (kind == "rewind") decoder.rewind(call.at("count"));
  if (kind == "reorder") decoder.reorder(call.at("order").get<std::vector<std::size_t>>());
  if (kind == "encode-file") {
    const std::string bytes = read(folder / call.at("file").get<std::string>());
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    decoder.encode(values, call.at("shape"));
  }
  return std::nullopt;
}

/// Makes the calls of a run: the likeliest tokens after each that returns logits, and a text if they are not as
/// expected, where -1 is any.
std::string follow(Decoder& decoder, const json& calls, const Path& folder, Tokens& made) {
  std::string problem;
  for (const json& call : calls) {
    const auto logits = make(decoder, call, folder);
    if (!logits) continue;
    const auto expect = call.at("expect").get<std::vector<std::int64_t>>();
    const std::string step = "step " + std::to_string(made.size());
    auto& tokens = made.emplace_back();
    for (std::size_t row = 0; row < logits->rows(); ++row) tokens.push_back(likeliest(logits->last(row)));
    const auto fits = [](std::int64_t token, std::int64_t due) { return due < 0 || token == due; };
    if (problem.empty() && !std::ranges::equal(tokens, expect, fits)) {
      problem = step + ": " + json(tokens).dump() + " in place of " + json(expect).dump();
    }
  }
  return problem;
}

/// Plays all runs of a file, and writes the trace; whether all tokens are as expected.
bool play(Decoder& decoder, const Path& runs, const Path& file) {
  const json vectors = json::parse(read(runs));
  require(vectors.at("schema") == kSchema, runs.string() + " has no runs of the schema " + std::string(kSchema));
  require(!std::filesystem::exists(file) || !std::filesystem::equivalent(file, runs),
          "--record is the file of --runs itself");
  std::ofstream lines(file);
  lines << vectors << std::endl;  // the runs that are due
  bool all = true;
  for (const json& run : vectors.at("runs")) {
    json ended{{"run", run.at("name")}, {"tokens", json::array()}, {"error", nullptr}};
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
    require(lines.good(), file.string() + " cannot be written");
    std::cout << run.at("name").get<std::string>() << ": " << (problem.empty() ? "as expected" : problem) << '\n';
    all = all && problem.empty();
  }
  decoder.trace_to({});
  return all;
}

/// Tokens go to standard output, a line for each sequence; whether all was as expected.
bool decode(Options given) {
  const Path contract = given.text("--contract", PROJECT_FOLDER "/contract.json"), record = given.text("--record");
  const Tokens prompts = given.rows("--prompt");
  require(!given.text("--model").empty(), "give the --model folder");
  require(!record.empty() || !prompts.empty(), "give at least one --prompt, or a --record; --help lists the options");
  Sampling sampling{.temperature = given.number("--temperature", 0.0F),
                    .top_k = given.number("--top-k", std::size_t{50}),
                    .top_p = given.number("--top-p", 1.0F),
                    .min_p = given.number("--min-p", 0.0F),
                    .repetition_penalty = given.number("--repetition-penalty", 1.0F),
                    .seed = given.number("--seed", std::uint64_t{0})};
  const Ort::Env env;
  Decoder decoder(env, given.text("--model"), Contract::read(contract), session_options(given),
                  given.number("--capacity", std::int64_t{512}));
  Generation generation = decoder.contract().generation;
  generation.most = given.number("--most", std::size_t{20});
  require(generation.most > 0, "--most is 1 or more");
  if (prompts.empty()) {
    const std::string next_to = (contract.parent_path() / "vectors.json").string();
    return play(decoder, given.text("--runs", next_to), record);
  }
  std::ofstream lines;
  if (!record.empty()) {
    lines.open(record);
    decoder.trace_to([&lines](const std::string& line) { lines << line << std::endl; });
  }
  const Tokens shape = given.rows("--source-shape"), stop = given.rows("--stop");
  if (!stop.empty()) generation.end = stop.back();
  if (!shape.empty()) {
    make(decoder, {{"call", "encode-file"}, {"file", given.text("--source")}, {"shape", shape.back()}}, {});
  } else if (!given.all("--source").empty()) {
    decoder.encode(given.rows("--source"));
  }
  for (const auto& row : decoder.generate(prompts, generation, Sampler(sampling))) {
    for (std::size_t i = 0; i < row.size(); ++i) std::cout << (i > 0 ? "," : "") << row[i];
    std::cout << '\n';
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
  return decode(Options(arguments)) ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
