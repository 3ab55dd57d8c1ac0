#include "decode_loop/json.hpp"

#include <charconv>
#include <stdexcept>

namespace decode_loop {

namespace {

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Json document() {
    Json value = read(0);
    if (next() != '\0' || at_ != text_.size()) fail();
    return value;
  }

 private:
  Json read(int depth) {
    if (depth > 100) fail();
    switch (next()) {
      case '{': {
        Json::Object members;
        items('}', [&] {
          std::string key = string();
          if (next() != ':') fail();
          ++at_;
          members.emplace_back(std::move(key), read(depth + 1));
        });
        return Json(std::move(members));
      }
      case '[': {
        Json::List values;
        items(']', [&] { values.push_back(read(depth + 1)); });
        return Json(std::move(values));
      }
      case '"':
        return Json(string());
      case 't':
        return literal("true", Json(true));
      case 'f':
        return literal("false", Json(false));
      case 'n':
        return literal("null", Json());
      default:
        return number();
    }
  }

  template <typename Item>
  void items(char end, Item item) {
    ++at_;
    if (next() == end) {
      ++at_;
      return;
    }
    while (true) {
      item();
      const char sign = next();
      ++at_;
      if (sign == end) return;
      if (sign != ',') fail();
    }
  }

  Json literal(std::string_view word, Json value) {
    if (text_.substr(at_, word.size()) != word) fail();
    at_ += word.size();
    return value;
  }

  Json number() {
    double value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc{}) fail();
    at_ = static_cast<std::size_t>(end - text_.data());
    return Json(value);
  }

  std::string string() {
    if (next() != '"') fail();
    ++at_;
    std::string made;
    while (true) {
      const char c = take();
      if (c == '"') return made;
      if (c != '\\') {
        made += c;
        continue;
      }
      const char escaped = take();
      if (escaped == 'u') {
        append(made, code_point());
      } else {
        constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
        const std::size_t place = kNames.find(escaped);
        if (place == std::string_view::npos) fail();
        made += kValues[place];
      }
    }
  }

  std::uint32_t code_point() {
    const std::uint32_t unit = hex();
    if (unit < 0xD800 || unit > 0xDBFF || text_.substr(at_, 2) != "\\u") return unit;
    at_ += 2;
    return 0x10000 + ((unit - 0xD800) << 10) + (hex() - 0xDC00);
  }

  std::uint32_t hex() {
    std::uint32_t unit = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), unit, 16);
    if (error != std::errc{} || end != digits.data() + 4) fail();
    at_ += 4;
    return unit;
  }

  static void append(std::string& made, std::uint32_t point) {
    const auto byte = [&made](std::uint32_t value) { made += static_cast<char>(static_cast<unsigned char>(value)); };
    if (point < 0x80) return byte(point);
    if (point >= 0xDC80 && point <= 0xDCFF) return byte(point - 0xDC00);  // of a name that is no UTF-8
    const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    byte(((0xF0U << (3 - more)) & 0xFFU) | point >> (6 * more));
    for (int i = more - 1; i >= 0; --i) byte(0x80U | (point >> (6 * i) & 0x3FU));
  }

  char next() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  char take() {
    if (at_ >= text_.size()) fail();
    return text_[at_++];
  }

  [[noreturn]] void fail() const { throw std::invalid_argument("no JSON at byte " + std::to_string(at_)); }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text) { return Reader(text).document(); }

const Json& Json::get(std::string_view key) const {
  static const Json missing;
  for (const auto& [name, value] : object()) {
    if (name == key) return value;
  }
  return missing;
}

const Json& Json::at(std::string_view key) const {
  for (const auto& [name, value] : object()) {
    if (name == key) return value;
  }
  throw std::invalid_argument("there is no \"" + std::string(key) + "\"");
}

std::vector<std::int64_t> Json::integers() const {
  std::vector<std::int64_t> made;
  for (const Json& one : list()) made.push_back(one.integer());
  return made;
}

void Json::fail(const char* what) { throw std::invalid_argument(std::string(what) + " is missing"); }

}  // namespace decode_loop
