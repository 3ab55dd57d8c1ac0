// A reader of JSON, for contract.json and vectors.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace decode_loop {

class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;

  /// Reads a text; throws std::invalid_argument with the place where it is no JSON.
  static Json parse(std::string_view text);

  Json() = default;
  template <typename T>
  explicit Json(T value) : value_(std::move(value)) {}

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_list() const { return std::holds_alternative<List>(value_); }
  bool is_number() const { return std::holds_alternative<double>(value_); }
  bool boolean() const { return as<bool>("true or false"); }
  double number() const { return as<double>("a number"); }
  std::int64_t integer() const { return static_cast<std::int64_t>(number()); }
  const std::string& text() const { return as<std::string>("a string"); }
  const List& list() const { return as<List>("a list"); }
  const Object& object() const { return as<Object>("an object"); }

  /// A member of an object, null where there is none.
  const Json& get(std::string_view key) const;
  /// A member that must be there.
  const Json& at(std::string_view key) const;
  /// A list of integers.
  std::vector<std::int64_t> integers() const;

 private:
  template <typename T>
  const T& as(const char* what) const {
    if (const T* value = std::get_if<T>(&value_)) return *value;
    fail(what);
  }
  [[noreturn]] static void fail(const char* what);

  std::variant<std::nullptr_t, bool, double, std::string, List, Object> value_ = nullptr;
};

}  // namespace decode_loop
