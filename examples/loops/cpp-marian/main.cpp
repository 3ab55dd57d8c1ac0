// Decodes from the command line: token ids in, token ids out. `decode --help` lists the options.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "decoder.hpp"
#include "probe.hpp"
#include "run.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: decode --model FOLDER --prompt IDS --source IDS [options]\n"
    "       decode --model FOLDER --probe FILE [options]\n"
    "IDS are token ids with commas between them.\n"
    "  --model FOLDER       folder of the model files\n"
    "  --prompt IDS         once for each sequence\n"
    "  --source IDS         ids for the encoder, once for each sequence\n"
    "  --most N             the most new tokens (20)\n"
    "  --stop IDS           ids that end a sequence\n"
    "  --follow IDS         continue with these ids whatever is likeliest; once for each sequence\n"
    "  --temperature T      0 takes the likeliest token, otherwise sampled (0)\n"
    "  --top-k K            sample from so many tokens (50)\n"
    "  --seed N             of the sampling (0)\n"
    "  --self-test TESTS    with --follow: also rewind,reorder, and compare\n"
    "  --provider NAME      the execution provider (CPUExecutionProvider)\n"
    "  --probe FILE         decode the runs in this file, and compare their tokens\n"
    "  --result FILE        with --probe: where calls and tokens are written (result.jsonl)\n";

struct Options {
  std::string model;
  std::string provider = "CPUExecutionProvider";
  Run run;
  std::size_t most = 20;
  Ids stop;
  float temperature = 0;
  std::size_t top_k = 50;
  std::uint64_t seed = 0;
  std::filesystem::path probe;
  std::filesystem::path result = "result.jsonl";
};

template <typename Number>
Number number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw UsageError("'" + std::string(text) + "' is not a number that fits here");
  }
  return value;
}

void check(const Options& options) {
  if (options.model.empty()) throw UsageError("--model is missing");
  if (options.most == 0 || options.top_k == 0) throw UsageError("--most and --top-k are at least 1");
  if (!(options.temperature >= 0)) throw UsageError("--temperature is 0 or more");
  if (options.probe.empty()) {
    check(options.run);
  } else if (!options.run.prompts.empty()) {
    throw UsageError("--probe takes its prompts from the file");
  }
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& option = arguments[i];
    if (i + 1 == arguments.size()) throw UsageError(option + " needs a value, or is no option");
    const std::string& value = arguments[i + 1];
    if (option == "--model") {
      options.model = value;
    } else if (option == "--provider") {
      options.provider = value;
    } else if (option == "--most") {
      options.most = number<std::size_t>(value);
    } else if (option == "--stop") {
      options.stop = parse_ids(value);
    } else if (option == "--temperature") {
      options.temperature = number<float>(value);
    } else if (option == "--top-k") {
      options.top_k = number<std::size_t>(value);
    } else if (option == "--seed") {
      options.seed = number<std::uint64_t>(value);
    } else if (option == "--probe") {
      options.probe = value;
    } else if (option == "--result") {
      options.result = value;
    } else if (!read_option(options.run, option, value)) {
      throw UsageError("unknown option " + option);
    }
  }
  check(options);
  return options;
}

Ort::SessionOptions session_options(const std::string& provider) {
  const std::vector<std::string> available = Ort::GetAvailableProviders();
  if (std::ranges::find(available, provider) == available.end()) {
    std::string names;
    for (const std::string& name : available) {
      if (!names.empty()) names += ", ";
      names += name;
    }
    throw UsageError("there is no provider '" + provider + "' in this build of ONNX Runtime, but " + names);
  }
  Ort::SessionOptions options;
  if (provider == "CUDAExecutionProvider") {
    options.AppendExecutionProvider_CUDA(OrtCUDAProviderOptions{});
  } else if (provider == "TensorrtExecutionProvider") {
    const OrtApi& api = Ort::GetApi();
    OrtTensorRTProviderOptionsV2* defaults = nullptr;
    Ort::ThrowOnError(api.CreateTensorRTProviderOptions(&defaults));
    const std::unique_ptr<OrtTensorRTProviderOptionsV2, void (*)(OrtTensorRTProviderOptionsV2*)> owner(
        defaults, api.ReleaseTensorRTProviderOptions);
    options.AppendExecutionProvider_TensorRT_V2(*defaults);
  } else if (provider != "CPUExecutionProvider") {
    options.AppendExecutionProvider(provider);
  }
  return options;
}

Decoder open(const Options& options) {
  return Decoder(options.model, session_options(options.provider));
}

// Picks a token from the `top_k` likeliest, by their probabilities at a temperature.
Choose sampler(float temperature, std::size_t top_k, std::uint64_t seed) {
  return [=, random = std::mt19937_64(seed)](std::span<const float> logits) mutable {
    std::vector<std::size_t> order(logits.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(std::min(top_k, order.size()));
    std::partial_sort(order.begin(), end, order.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
    std::vector<double> weights;
    for (auto one = order.begin(); one != end; ++one) {
      weights.push_back(std::exp((logits[*one] - logits[order.front()]) / temperature));
    }
    std::discrete_distribution<std::size_t> distribution(weights.begin(), weights.end());
    return static_cast<std::int64_t>(order[distribution(random)]);
  };
}

// ", peak memory N MiB", the largest resident memory of this process so far; empty where it is unknown.
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

void decode(const Options& options) {
  Decoder decoder = open(options);
  const auto began = Clock::now();
  encode(decoder, options.run);
  std::vector<Clock::time_point> times;
  Tokens made;
  if (options.run.follow.empty()) {
    const Choose choose =
        options.temperature > 0 ? sampler(options.temperature, options.top_k, options.seed) : Choose{};
    const auto on_token = [&](std::size_t, std::int64_t) { times.push_back(Clock::now()); };
    made = decoder.generate(options.run.prompts, options.most, options.stop, choose, on_token);
  } else {
    made = follow(decoder, options.run, [&] { times.push_back(Clock::now()); });
  }
  for (const Ids& row : made) std::cout << join(row) << '\n';
  print_measured(began, times);
}

bool probe(const Options& options) {
  const std::vector<ProbeRun> runs = read_probe(options.probe);
  if (std::error_code none; std::filesystem::equivalent(options.probe, options.result, none)) {
    throw UsageError("--result is the file of --probe itself");
  }
  // Emptied before the model is opened: nothing of an earlier probe remains where that fails.
  if (!std::ofstream(options.result)) throw UsageError("cannot write " + options.result.string());
  Decoder decoder = open(options);
  return probe(decoder, runs, options.result);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::ranges::find(arguments, "--help") != arguments.end()) {
    std::cout << kUsage;
    return 0;
  }
  try {
    const Options options = parse(arguments);
    if (!options.probe.empty()) return probe(options) ? 0 : 1;
    decode(options);
    return 0;
  } catch (const UsageError& error) {
    std::cerr << "error: " << error.what() << '\n' << kUsage;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
