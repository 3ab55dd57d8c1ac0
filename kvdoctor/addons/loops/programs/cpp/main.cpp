// Decodes from the command line: token ids in, token ids out. `decode --help` lists the options.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
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
    "  --follow IDS         continue with these ids whatever is likeliest; once a sequence\n"
    "  --self-test TESTS    with --follow: also rewind,reorder, and compare\n"
    "  --temperature T      0 takes the likeliest token, otherwise sampled (0)\n"
    "  --top-k N            sample from so many tokens, 0 for all (50)\n"
    "  --top-p P            sample from the likeliest tokens with this probability (1)\n"
    "  --min-p P            sample from tokens with this part of the largest probability (0)\n"
    "  --repetition-penalty X  on tokens that are there already (1)\n"
    "  --seed N             of the sampling (0)\n"
    "  --capacity N         room of the cache in tokens, where the contract leaves it open (512)\n"
    "  --threads N          threads of a session\n"
    "  --provider NAME      execution provider (CPUExecutionProvider)\n"
    "  --record FILE        play the runs, and write a trace for kvdoctor step-test --trace\n"
    "  --runs FILE          runs to play (vectors.json next to the contract)\n";

struct Options {
  std::filesystem::path model, contract = std::filesystem::path(PROJECT_FOLDER) / "contract.json", record, runs;
  std::string provider = "CPUExecutionProvider";
  std::int64_t capacity = 512;
  int threads = 0;
  Run run;
  std::vector<std::string> sources;
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
      {"--prompt", [&] { all.run.prompts.push_back(numbers(option, value)); }},
      {"--follow", [&] { all.run.follow.push_back(numbers(option, value)); }},
      {"--source", [&] { all.sources.push_back(value); }},
      {"--source-shape", [&] { all.run.source_shape = numbers(option, value); }},
      {"--stop", [&] { all.stop = numbers(option, value); }},
      {"--self-test",
       [&] {
         std::istringstream tests(value);
         for (std::string test; std::getline(tests, test, ',');) all.run.self_tests.push_back(test);
       }},
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
  if (all.record.empty() == all.run.prompts.empty()) {
    throw std::invalid_argument("give at least one --prompt, or a --record; --help lists the options");
  }
  if (all.most < 1) throw std::invalid_argument("--most is 1 or more");
  if (all.run.follow.empty() && !all.run.self_tests.empty()) throw std::invalid_argument("--self-test needs --follow");
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
    const OrtApi& api = Ort::GetApi();
    OrtTensorRTProviderOptionsV2* defaults = nullptr;
    Ort::ThrowOnError(api.CreateTensorRTProviderOptions(&defaults));
    const std::unique_ptr<OrtTensorRTProviderOptionsV2, void (*)(OrtTensorRTProviderOptionsV2*)> owner(
        defaults, api.ReleaseTensorRTProviderOptions);
    options.AppendExecutionProvider_TensorRT_V2(*defaults);
  } else if (given.provider != "CPUExecutionProvider") {
    options.AppendExecutionProvider(given.provider);
  }
  return options;
}

/// Sets the source in the form that the contract asks for.
void set_source(Options& given, const Contract& contract) {
  if (!contract.source && !given.sources.empty()) throw std::invalid_argument("this model takes no --source");
  if (contract.source && given.sources.empty()) throw std::invalid_argument("give a --source");
  if (!contract.source) return;
  if (!contract.source_is_ids()) {
    given.run.source_file = given.sources.front();
    return;
  }
  for (const std::string& source : given.sources) given.run.sources.push_back(numbers("--source", source));
}

/// ", peak memory N MiB", the largest resident memory of this process so far; empty where it is unknown.
std::string peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("VmHWM:")) continue;
    return ", peak memory " + std::to_string(std::atol(line.c_str() + 6) / 1024) + " MiB";
  }
  return "";
}

void print_measured(Clock::time_point began, const std::vector<Clock::time_point>& times) {
  if (times.empty()) return;
  using Seconds = std::chrono::duration<double>;
  const double span = Seconds(times.back() - times.front()).count();
  const double rate = span > 0 ? static_cast<double>(times.size() - 1) / span : 0;
  std::cerr << std::fixed << std::setprecision(1) << "first token " << Seconds(times.front() - began).count() * 1000
            << " ms, " << rate << " tokens/s" << peak_memory() << "\n";
}

/// Tokens go to standard output, a line for each sequence, and measurements to standard error.
int decode(Options given) {
  const Ort::Env env;
  Decoder decoder(env, given.model, Contract::read(given.contract), session_options(given), given.capacity);
  if (!given.record.empty()) {
    const auto runs = given.runs.empty() ? given.contract.parent_path() / "vectors.json" : given.runs;
    return record(decoder, runs, given.record) ? 0 : 1;
  }
  if (const char* file = std::getenv("KVDOCTOR_TRACE"); file != nullptr && *file != '\0') decoder.trace_to({file, ""});
  set_source(given, decoder.contract());
  const auto began = Clock::now();
  given.run.encode(decoder);
  std::vector<Clock::time_point> times;
  Tokens made;
  if (!given.run.follow.empty()) {
    made = given.run.decode(decoder, [&times] { times.push_back(Clock::now()); });
  } else {
    Generation generation = decoder.contract().generation;
    generation.most = given.most;
    generation.end = given.stop.value_or(generation.end);
    made = decoder.generate(given.run.prompts, generation, Sampler(given.sampling), [&times](Token) {
      times.push_back(Clock::now());
      return true;
    });
  }
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
