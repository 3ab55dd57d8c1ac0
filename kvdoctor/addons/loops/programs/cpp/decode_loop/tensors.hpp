// Values of the runtime: their elements as numbers of any type, their rows as bytes.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace decode_loop {

using Shape = std::vector<std::int64_t>;

std::size_t elements_of(const Shape& shape);
Shape shape_of(const Ort::Value& value);
std::int64_t size_of(const Ort::Value& value, std::size_t axis);

Ort::Value zeros(const Shape& shape, ONNXTensorElementDataType type);

/// Rows of a tensor along an axis, from `begin` to before `end`.
struct Rows {
  const Ort::Value* value;
  std::int64_t begin, end;
};

/// Rows of tensors in sequence along an axis. It copies bytes, whatever the elements are.
Ort::Value join(std::size_t axis, const std::vector<Rows>& pieces);
/// Writes the rows of a tensor over those of another one, from a row on.
void write_rows(Ort::Value& target, std::size_t axis, std::int64_t from, const Ort::Value& value);

template <typename T>
T element(double value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value != 0;
  } else if constexpr (std::is_same_v<T, Ort::Float16_t> || std::is_same_v<T, Ort::BFloat16_t>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
float as_float(T value) {
  if constexpr (std::is_same_v<T, Ort::Float16_t> || std::is_same_v<T, Ort::BFloat16_t>) {
    return value.ToFloat();
  } else {
    return static_cast<float>(value);
  }
}

/// Calls a function with the type of elements as its template parameter.
template <typename Function>
auto with_type(ONNXTensorElementDataType type, Function function) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return function.template operator()<float>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return function.template operator()<Ort::Float16_t>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return function.template operator()<Ort::BFloat16_t>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return function.template operator()<double>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return function.template operator()<std::int64_t>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return function.template operator()<std::int32_t>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return function.template operator()<std::int8_t>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return function.template operator()<std::uint8_t>();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return function.template operator()<bool>();
    default:
      throw std::invalid_argument("there is no element type " + std::to_string(type) + " here");
  }
}

/// Element i of a tensor.
using Elements = std::function<double(std::size_t i)>;

/// A tensor of such elements.
Ort::Value tensor(const Shape& shape, ONNXTensorElementDataType type, const Elements& at);

}  // namespace decode_loop
