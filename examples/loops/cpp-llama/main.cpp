// Decodes from the command line: token ids in, token ids out. `decode --help` lists the options.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "decoder.hpp"

namespace {

using Ids = std::vector<std::int64_t>;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: decode --model FOLDER --prompt IDS [options]\n"
    "IDS are token ids with commas between them.\n"
    "  --model FOLDER       folder of the model files\n"
    "  --prompt IDS         once for each sequence\n"
    "  --most N             the most new tokens (20)\n"
    "  --stop IDS           ids that end a sequence\n"
    "  --follow IDS         continue with these ids whatever is likeliest; once for each sequence\n"
    "  --temperature T      0 takes the likeliest token, otherwise sampled (0)\n"
    "  --top-k K            sample from so many tokens (50)\n"
    "  --self-test TESTS    with --follow: also rewind,reorder, and compare\n"
    "  --seed N             of the sampling (0)\n";

// Arguments that cannot be right: the program ends with code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string model;
  Tokens prompts;
  std::size_t most = 20;
  Ids stop;
  Tokens follow;
  float temperature = 0;
  std::size_t top_k = 50;
  std::uint64_t seed = 0;
  std::string self_test;
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

Ids ids(std::string_view text) {
  Ids all;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    if (!part.empty()) all.push_back(number<std::int64_t>(part));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
  }
  return all;
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& flag = arguments[i];
    if (i + 1 == arguments.size()) throw UsageError(flag + " needs a value, or is no option");
    const std::string& value = arguments[i + 1];
    if (flag == "--model") {
      options.model = value;
    } else if (flag == "--prompt") {
      options.prompts.push_back(ids(value));
    } else if (flag == "--most") {
      options.most = number<std::size_t>(value);
    } else if (flag == "--stop") {
      options.stop = ids(value);
    } else if (flag == "--follow") {
      options.follow.push_back(ids(value));
    } else if (flag == "--temperature") {
      options.temperature = number<float>(value);
    } else if (flag == "--top-k") {
      options.top_k = number<std::size_t>(value);
    } else if (flag == "--seed") {
      options.seed = number<std::uint64_t>(value);
    } else if (flag == "--self-test") {
      options.self_test = value;
    } else {
      throw UsageError("unknown option " + flag);
    }
  }
  if (options.model.empty()) throw UsageError("--model is missing");
  if (options.prompts.empty()) throw UsageError("--prompt is missing");
  if (options.top_k == 0) throw UsageError("--top-k is at least 1");
  return options;
}

// The tokens of a step: one of each sequence.
Tokens column(const Tokens& rows, std::size_t position) {
  Tokens tokens;
  for (const Ids& row : rows) tokens.push_back({row[position]});
  return tokens;
}

// The likeliest token after the prompt and after each given one, whatever was likeliest before.
Tokens follow(Decoder& decoder, const Tokens& prompts, const Tokens& given, std::vector<Clock::time_point>& times) {
  for (const Ids& row : given) {
    if (given.size() != prompts.size() || row.size() != given.front().size()) {
      throw UsageError("--follow is given once for each prompt, always with as many ids");
    }
  }
  Tokens made(prompts.size());
  const auto keep = [&](const Logits& logits) {
    times.push_back(Clock::now());
    for (std::size_t row = 0; row < made.size(); ++row) made[row].push_back(likeliest(logits[row]));
  };
  keep(decoder.prefill(prompts));
  for (std::size_t i = 0; i < given.front().size(); ++i) keep(decoder.step(column(given, i)));
  return made;
}

// Ends the program where other tokens are likeliest.
void compare(std::string_view name, const Logits& logits, const Ids& expected) {
  Ids got;
  for (const auto& row : logits) got.push_back(likeliest(row));
  if (got != expected) throw std::runtime_error(std::string(name) + ": other tokens are likeliest than before");
}

// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
void self_test(Decoder& decoder, std::string_view wanted, const Tokens& given, const Tokens& made) {
  if (given.front().empty()) throw UsageError("--self-test needs a token to follow");
  const std::size_t end = given.front().size() - 1;
  const Tokens last = column(given, end);
  Ids expected;
  for (const Ids& row : made) expected.push_back(row.back());
  if (wanted.find("rewind") != std::string_view::npos) {
    decoder.rewind(1);
    compare("rewind", decoder.step(last), expected);
  }
  if (wanted.find("reorder") != std::string_view::npos) {
    decoder.rewind(1);
    std::vector<std::size_t> order(given.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    order.push_back(0);  // the rows backwards, and the first one once more
    decoder.reorder(order);
    Tokens tokens;
    Ids likeliest_then;
    for (const std::size_t row : order) {
      tokens.push_back(last[row]);
      likeliest_then.push_back(expected[row]);
    }
    compare("reorder", decoder.step(tokens), likeliest_then);
  }
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

// The largest resident memory of this process so far in MiB; 0 where the system does not tell.
long peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::atol(line.c_str() + 6) / 1024;
  }
  return 0;
}

void print_measured(Clock::time_point began, const std::vector<Clock::time_point>& times) {
  if (times.empty()) return;
  using Seconds = std::chrono::duration<double>;
  const double span = Seconds(times.back() - times.front()).count();
  const double rate = span > 0 ? static_cast<double>(times.size() - 1) / span : 0;
  std::cerr << std::fixed << std::setprecision(1) << "first token " << Seconds(times.front() - began).count() * 1000
            << " ms, " << rate << " tokens/s, peak memory " << peak_mib() << " MiB\n";
}

void decode(const Options& options) {
  Decoder decoder(options.model);
  const auto began = Clock::now();
  std::vector<Clock::time_point> times;
  Tokens made;
  if (options.follow.empty()) {
    const Choose choose =
        options.temperature > 0 ? sampler(options.temperature, options.top_k, options.seed) : Choose{};
    const auto on_token = [&](std::size_t, std::int64_t) { times.push_back(Clock::now()); };
    made = decoder.generate(options.prompts, options.most, options.stop, choose, on_token);
  } else {
    made = follow(decoder, options.prompts, options.follow, times);
    self_test(decoder, options.self_test, options.follow, made);
  }
  for (const Ids& row : made) {
    for (std::size_t i = 0; i < row.size(); ++i) std::cout << (i > 0 ? "," : "") << row[i];
    std::cout << '\n';
  }
  print_measured(began, times);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::ranges::find(arguments, "--help") != arguments.end()) {
    std::cout << kUsage;
    return 0;
  }
  try {
    decode(parse(arguments));
    return 0;
  } catch (const UsageError& error) {
    std::cerr << "error: " << error.what() << '\n' << kUsage;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
