// Decodes from the command line: token ids in, token ids out. `decode --help` lists the options.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_loop/decoder.hpp"
#include "runs.hpp"

namespace {

using namespace decode_loop;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
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

struct Options {
  std::filesystem::path model, contract = std::filesystem::path(PROJECT_FOLDER) / "contract.json", record, runs;
  std::string provider = "CPUExecutionProvider";
  std::int64_t capacity = 512;
  int threads = 0;
  Tokens prompts;
  std::vector<std::string> sources;
  Shape source_shape;
  std::size_t most = 20;
  std::optional<std::vector<std::int64_t>> stop;
  Sampling sampling{.top_k = 50};
};

template <typename Number>
void set(Number& number, const std::string& option, const std::string& text) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  Number read{};
  if (text.starts_with('-') || !(stream >> read) || stream.peek() != std::istringstream::traits_type::eof()) {
    throw std::invalid_argument(option + " " + text + ": this is no number that fits");
  }
  number = read;
}

/// Numbers with commas between them.
std::vector<std::int64_t> numbers(const std::string& option, const std::string& text) {
  std::vector<std::int64_t> made;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const char* const last = part.data() + part.size();
    const auto [end, error] = std::from_chars(part.data(), last, made.emplace_back());
    if (error != std::errc{} || end != last) {
      throw std::invalid_argument(option + " " + text + ": these are not numbers with commas");
    }
  }
  return made;
}

Options parse(const std::vector<std::string>& arguments) {
  Options all;
  Sampling& sampling = all.sampling;
  std::string option, value;
  const auto to = [&](auto& number) { return [&] { set(number, option, value); }; };
  const std::map<std::string, std::function<void()>, std::less<>> known{
      {"--model", [&] { all.model = value; }},
      {"--contract", [&] { all.contract = value; }},
      {"--record", [&] { all.record = value; }},
      {"--runs", [&] { all.runs = value; }},
      {"--provider", [&] { all.provider = value; }},
      {"--prompt", [&] { all.prompts.push_back(numbers(option, value)); }},
      {"--source", [&] { all.sources.push_back(value); }},
      {"--source-shape", [&] { all.source_shape = numbers(option, value); }},
      {"--stop", [&] { all.stop = numbers(option, value); }},
      {"--capacity", to(all.capacity)},
      {"--threads", to(all.threads)},
      {"--most", to(all.most)},
      {"--temperature", to(sampling.temperature)},
      {"--top-k", to(sampling.top_k)},
      {"--top-p", to(sampling.top_p)},
      {"--min-p", to(sampling.min_p)},
      {"--repetition-penalty", to(sampling.repetition_penalty)},
      {"--seed", to(sampling.seed)},
  };
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    option = arguments[i];
    const auto found = known.find(option);
    if (found == known.end()) throw std::invalid_argument("there is no option " + option + "; --help lists them");
    if (i + 1 == arguments.size()) throw std::invalid_argument(option + " needs a value");
    value = arguments[i + 1];
    found->second();
  }
  if (all.model.empty()) throw std::invalid_argument("give the --model folder");
  if (all.record.empty() && all.prompts.empty()) {
    throw std::invalid_argument("give at least one --prompt, or a --record; --help lists the options");
  }
  if (all.most < 1) throw std::invalid_argument("--most is 1 or more");
  return all;
}

Ort::SessionOptions session_options(const Options& given) {
  const std::vector<std::string> available = Ort::GetAvailableProviders();
  if (std::ranges::find(available, given.provider) == available.end()) {
    std::string names;
    for (const std::string& name : available) names += (names.empty() ? "" : ", ") + name;
    throw std::invalid_argument("there is no provider " + given.provider + " in this ONNX Runtime; it has " + names);
  }
  Ort::SessionOptions options;
  if (given.threads > 0) options.SetIntraOpNumThreads(given.threads);
  if (given.provider == "CUDAExecutionProvider") {
    options.AppendExecutionProvider_CUDA(OrtCUDAProviderOptions{});
  } else if (given.provider == "TensorrtExecutionProvider") {
    options.AppendExecutionProvider_TensorRT(OrtTensorRTProviderOptions{});
  } else if (given.provider != "CPUExecutionProvider") {
    options.AppendExecutionProvider(given.provider);
  }
  return options;
}

/// Gives the source to the decoder: ids, or a file where its shape is given.
void encode(Decoder& decoder, const Options& given) {
  if (!decoder.contract().source && !given.sources.empty()) throw std::invalid_argument("this model takes no --source");
  if (decoder.contract().source && given.sources.empty()) throw std::invalid_argument("give a --source");
  Tokens ids;
  if (given.source_shape.empty()) {
    for (const std::string& source : given.sources) ids.push_back(numbers("--source", source));
  } else {
    encode_file(decoder, given.sources.front(), given.source_shape);
  }
  if (!ids.empty()) decoder.encode(ids);
}

void print_measured(Clock::time_point began, const std::vector<Clock::time_point>& times) {
  if (times.empty()) return;
  using Seconds = std::chrono::duration<double>;
  const double span = Seconds(times.back() - times.front()).count();
  const double rate = span > 0 ? static_cast<double>(times.size() - 1) / span : 0;
  std::cerr << std::fixed << std::setprecision(1) << "first token " << Seconds(times.front() - began).count() * 1000
            << " ms, " << rate << " tokens/s\n";
}

/// Tokens go to standard output, a line for each sequence, and measurements to standard error.
int decode(const Options& given) {
  const Ort::Env env;
  Decoder decoder(env, given.model, Contract::read(given.contract), session_options(given), given.capacity);
  if (given.prompts.empty()) {
    const auto runs = given.runs.empty() ? given.contract.parent_path() / "vectors.json" : given.runs;
    return play(decoder, runs, given.record) ? 0 : 1;
  }
  std::ofstream lines;
  if (!given.record.empty()) {
    lines.open(given.record);
    decoder.trace_to([&lines](const std::string& line) { lines << line << std::endl; });
  }
  const auto began = Clock::now();
  encode(decoder, given);
  std::vector<Clock::time_point> times;
  Generation generation = decoder.contract().generation;
  generation.most = given.most;
  generation.end = given.stop.value_or(generation.end);
  const auto note = [&times](Token) {
    times.push_back(Clock::now());
    return true;
  };
  const Tokens made = decoder.generate(given.prompts, generation, Sampler(given.sampling), note);
  for (const auto& row : made) std::cout << listed(row) << '\n';
  print_measured(began, times);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::ranges::find(arguments, "--help") != arguments.end()) {
    std::cout << kUsage;
    return 0;
  }
  try {
    return decode(parse(arguments));
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
