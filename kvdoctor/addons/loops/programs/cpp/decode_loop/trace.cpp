#include "decode_loop/trace.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "decode_loop/tensors.hpp"

namespace decode_loop {

namespace {

using nlohmann::json;

constexpr std::size_t kMostElements = 64;  // of a tensor in a line

json describe(const Tensors& tensors) {
  json all = json::object();
  for (const auto& [name, value] : tensors) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const std::size_t size = info.GetElementCount(), count = std::min(size, kMostElements);
    json numbers = json::array();
    with_type(info.GetElementType(), [&]<typename T>() {
      for (std::size_t k = 0; k < count; ++k) {
        const T entry = value.GetTensorData<T>()[size == count ? k : k * (size - 1) / (count - 1)];
        if constexpr (std::is_integral_v<T>) {
          numbers.push_back(entry);
        } else {
          numbers.push_back(as_float(entry));  // null where it is not finite
        }
      }
    });
    all[std::string(name)] = {{"dtype", static_cast<int>(info.GetElementType())},
                              {"shape", info.GetShape()},
                              {size == count ? "data" : "sample", numbers}};
  }
  return all;
}

}  // namespace

std::string describe_call(const std::string& file, const Tensors& fed, const Tensors& got, const Ort::Status& status) {
  json line{{"file", file}, {"fed", describe(fed)}, {"got", describe(got)}, {"error", nullptr}};
  if (!status.IsOK()) line["error"] = status.GetErrorMessage();
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace decode_loop
