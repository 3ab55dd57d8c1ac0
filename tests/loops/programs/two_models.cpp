// Two libraries and two models in one process, and calls that cannot be right between calls that are.

#include <algorithm>
#include <iostream>
#include <thread>

#include "first_loop/decoder.hpp"
#include "second_loop/decoder.hpp"

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

template <typename Call>
void refused(Call call, const std::string& reason) {
  try {
    call();
  } catch (const std::exception& error) {
    require(std::string(error.what()).find(reason) != std::string::npos, error.what());
    return;
  }
  throw std::runtime_error("not refused: " + reason);
}

template <typename Tokens>
void print(const Tokens& tokens) {
  for (const auto& row : tokens) {
    for (const auto id : row) std::cout << id << ' ';
  }
  std::cout << '\n';
}

void run(char** given) {
  const Ort::Env env;
  const auto contract = first_loop::Contract::read(given[3]);
  first_loop::Decoder llama(env, given[1], contract);
  second_loop::Decoder marian(env, given[2], second_loop::Contract::read(given[4]));
  marian.encode(second_loop::Tokens{{5, 6, 7}});
  first_loop::Generation generation;
  generation.most = 6;
  second_loop::Generation other;
  other.most = 6;
  const auto first = llama.generate({{5, 6, 7}}, generation);
  const auto second = marian.generate({{5, 6, 7}}, other);
  require(llama.generate({{5, 6, 7}}, generation) == first, "llama decodes otherwise");
  require(marian.generate({{5, 6, 7}}, other) == second, "marian decodes otherwise");
  print(first);
  print(second);

  refused([&] { first_loop::Decoder(env, given[2], contract); }, "there is no file");
  llama.prefill({{5, 6, 7}});
  const auto row = [&] {
    const auto logits = llama.step({{9}});
    const auto last = logits.last(0);
    return std::vector<float>(last.begin(), last.end());
  };
  const auto expected = row();
  llama.rewind(1);
  refused([&] { llama.step({{4096}}); }, "token ids are 0 to 127, not 4096");
  refused([&] { llama.step({{1}, {2}}); }, "new tokens of 1 sequences");
  refused([&] { llama.prefill({{}}); }, "at least one token");
  refused([&] { llama.prefill({std::vector<std::int64_t>(4097, 1)}); }, "a sequence has at most");
  refused([&] { llama.rewind(3); }, "cannot forget 3 of 3 tokens");
  refused([&] { llama.reorder(std::vector<std::size_t>{1}); }, "not rows of 1");
  refused([&] { llama.encode(first_loop::Tokens{{1}}); }, "no encoder");
  require(llama.length() == 3 && row() == expected, "a refused call changed something");
  refused([&] { marian.encode(std::vector<float>{1}, {1, 1, 1}); }, "other axes");
  require(marian.generate({{5, 6, 7}}, other) == second, "a refused source changed something");

  const first_loop::Choose failing = [](auto, auto) -> std::int64_t { throw std::runtime_error("no more"); };
  refused([&] { llama.generate({{5, 6, 7}}, generation, failing); }, "no more");
  std::size_t seen = 0;
  const auto two = llama.generate({{5, 6, 7}}, generation, {}, [&seen](auto) { return ++seen < 2; });
  require(two[0] == std::vector(first[0].begin(), first[0].begin() + 2), "a callback did not stop it");
  std::stop_source stop;
  const auto stopped = llama.generate({{5, 6, 7}}, generation, {}, [&stop](auto) { return stop.request_stop(); },
                                      stop.get_token());
  require(stopped[0].size() == 1, "a stop was not heard");
  require(llama.prefill({{5, 6, 7}}).tokens() == 3, "the logits of all new tokens");
  require(llama.generate({{5, 6, 7}}, generation) == first, "the decoder is not usable after a stop");
}

}  // namespace

int main(int, char** argv) try { run(argv); } catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
