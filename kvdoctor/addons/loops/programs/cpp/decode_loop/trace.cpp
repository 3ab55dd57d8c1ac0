#include "decode_loop/trace.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <limits>
#include <locale>

#include "decode_loop/tensors.hpp"

namespace decode_loop {

namespace {

constexpr std::size_t kMostElements = 64;  // of a tensor in a line

void write_tensor(std::ostream& out, const Ort::ConstValue& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  out << "{\"dtype\":" << static_cast<int>(info.GetElementType()) << ",\"shape\":[";
  const char* comma = "";
  for (const std::int64_t size : info.GetShape()) out << std::exchange(comma, ",") << size;
  const std::size_t size = info.GetElementCount(), count = std::min(size, kMostElements);
  out << (size <= kMostElements ? "],\"data\":[" : "],\"sample\":[");
  with_type(info.GetElementType(), [&]<typename T>() {
    for (std::size_t i = 0; i < count; ++i) {
      if (i > 0) out << ',';
      const T entry = value.GetTensorData<T>()[size <= kMostElements ? i : i * (size - 1) / (kMostElements - 1)];
      if constexpr (std::is_same_v<T, bool>) {
        out << (entry ? "true" : "false");
      } else if constexpr (std::is_integral_v<T>) {
        out << static_cast<std::int64_t>(entry);
      } else if (const float number = as_float(entry); std::isfinite(number)) {
        out << number;
      } else {
        out << "null";  // JSON has no NaN and no infinity
      }
    }
  });
  out << "]}";
}

void write_side(std::ostream& out, std::string_view side, const Tensors& tensors) {
  out << ",\"" << side << "\":{";
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
  write_side(out, "fed", fed);
  if (status.IsOK()) {
    write_side(out, "got", got);
  } else {
    out << ",\"error\":";
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

}  // namespace decode_loop
