#include "decode_loop/tensors.hpp"

#include <cstring>
#include <functional>
#include <numeric>
#include <string>

namespace decode_loop {

namespace {

std::size_t bytes_of(const Ort::Value& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  const auto width = with_type(info.GetElementType(), []<typename T>() { return sizeof(T); });
  return info.GetElementCount() * width;
}

Ort::Value allocated(const Shape& shape, ONNXTensorElementDataType type) {
  Ort::AllocatorWithDefaultOptions allocator;
  return Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type);
}

}  // namespace

std::size_t elements_of(const Shape& shape) {
  return static_cast<std::size_t>(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
}

Shape shape_of(const Ort::Value& value) { return value.GetTensorTypeAndShapeInfo().GetShape(); }

std::int64_t size_of(const Ort::Value& value, std::size_t axis) { return shape_of(value).at(axis); }

Ort::Value tensor(const Shape& shape, ONNXTensorElementDataType type, const Elements& at) {
  Ort::Value made = allocated(shape, type);
  const std::size_t count = elements_of(shape);
  with_type(type, [&]<typename T>() {
    T* values = count > 0 ? made.GetTensorMutableData<T>() : nullptr;
    for (std::size_t i = 0; i < count; ++i) values[i] = element<T>(at(i));
  });
  return made;
}

Ort::Value zeros(const Shape& shape, ONNXTensorElementDataType type) {
  Ort::Value made = allocated(shape, type);
  if (const std::size_t size = bytes_of(made); size > 0) std::memset(made.GetTensorMutableRawData(), 0, size);
  return made;
}

Ort::Value join(std::size_t axis, const std::vector<Rows>& pieces) {
  Shape shape = shape_of(*pieces.at(0).value);
  const std::size_t blocks = elements_of({shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(axis)});
  shape.at(axis) = 0;
  for (const Rows& rows : pieces) {
    if (rows.begin < 0 || rows.begin > rows.end || rows.end > size_of(*rows.value, axis)) {
      throw std::invalid_argument("the cache has " + std::to_string(size_of(*rows.value, axis)) + " rows, not " +
                                  std::to_string(rows.end));
    }
    shape[axis] += rows.end - rows.begin;
  }
  Ort::Value made = allocated(shape, pieces[0].value->GetTensorTypeAndShapeInfo().GetElementType());
  const std::size_t size = bytes_of(made);
  if (size == 0) return made;
  const std::size_t row = size / blocks / static_cast<std::size_t>(shape[axis]);
  auto* target = static_cast<char*>(made.GetTensorMutableRawData());
  for (std::size_t block = 0; block < blocks; ++block) {
    for (const Rows& rows : pieces) {
      if (rows.begin == rows.end) continue;
      const auto length = static_cast<std::size_t>(size_of(*rows.value, axis));
      const auto* data = static_cast<const char*>(rows.value->GetTensorRawData());
      const std::size_t count = static_cast<std::size_t>(rows.end - rows.begin) * row;
      std::memcpy(target, data + (block * length + static_cast<std::size_t>(rows.begin)) * row, count);
      target += count;
    }
  }
  return made;
}

void write_rows(Ort::Value& target, std::size_t axis, std::int64_t from, const Ort::Value& value) {
  const std::int64_t length = size_of(target, axis), count = size_of(value, axis);
  if (from + count > length) {
    throw std::invalid_argument("the cache has room for " + std::to_string(length) + " tokens");
  }
  const Shape shape = shape_of(target);
  const std::size_t blocks = elements_of({shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(axis)});
  const std::size_t part = bytes_of(value) / blocks;
  if (part == 0) return;
  const std::size_t row = part / static_cast<std::size_t>(count), stride = row * static_cast<std::size_t>(length);
  auto* to = static_cast<char*>(target.GetTensorMutableRawData()) + static_cast<std::size_t>(from) * row;
  const auto* data = static_cast<const char*>(value.GetTensorRawData());
  for (std::size_t block = 0; block < blocks; ++block) std::memcpy(to + block * stride, data + block * part, part);
}

}  // namespace decode_loop
