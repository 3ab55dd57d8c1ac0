#include "trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iomanip>
#include <limits>
#include <locale>
#include <type_traits>
#include <utility>

namespace {

constexpr std::size_t kMostEntries = 64;  // of a tensor in a line

template <typename T>
void write_entries(std::ostream& out, const Ort::ConstValue& value, std::size_t size) {
  const T* data = value.GetTensorData<T>();
  const bool all = size <= kMostEntries;
  const std::size_t count = std::min(size, kMostEntries);
  out << (all ? ",\"data\":[" : ",\"sample\":[");
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) out << ',';
    const T entry = data[all ? i : i * (size - 1) / (kMostEntries - 1)];
    if constexpr (std::is_same_v<T, bool>) {
      out << (entry ? "true" : "false");
    } else if constexpr (std::is_integral_v<T>) {
      out << static_cast<std::int64_t>(entry);
    } else if (const auto number = static_cast<float>(entry); std::isfinite(number)) {
      out << number;
    } else {
      out << "null";  // JSON has no NaN and no infinity
    }
  }
  out << ']';
}

void write_tensor(std::ostream& out, const Ort::ConstValue& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  out << "{\"dtype\":" << static_cast<int>(info.GetElementType()) << ",\"shape\":[";
  const char* comma = "";
  for (const std::int64_t size : info.GetShape()) out << std::exchange(comma, ",") << size;
  out << ']';
  switch (info.GetElementType()) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      write_entries<bool>(out, value, info.GetElementCount());
      break;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      write_entries<float>(out, value, info.GetElementCount());
      break;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      write_entries<std::int64_t>(out, value, info.GetElementCount());
      break;
    default:
      break;
  }
  out << '}';
}

void write_side(std::ostream& out, const Tensors& tensors) {
  out << '{';
  const char* comma = "";
  for (const auto& [name, value] : tensors) {
    out << std::exchange(comma, ",");
    write_json(out, name);
    out << ':';
    write_tensor(out, value);
  }
  out << '}';
}

}  // namespace

void Trace::note(std::string_view model, const Tensors& fed, const Tensors& got, const Ort::Status& status) const {
  std::ofstream out(file, std::ios::app);
  out.imbue(std::locale::classic());
  out << std::setprecision(std::numeric_limits<float>::max_digits10) << '{';
  if (!run.empty()) {
    out << "\"run\":";
    write_json(out, run);
    out << ',';
  }
  out << "\"file\":";
  write_json(out, model);
  out << ",\"fed\":";
  write_side(out, fed);
  out << ",\"error\":";
  if (status.IsOK()) {
    out << "null,\"got\":";
    write_side(out, got);
  } else {
    write_json(out, status.GetErrorMessage());
  }
  out << "}\n";
}

void write_json(std::ostream& out, std::string_view text) {
  out << '"' << std::hex << std::setfill('0');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out << "\\u" << std::setw(4) << static_cast<int>(c);
    } else {
      out << c;
    }
  }
  out << '"' << std::dec;
}
