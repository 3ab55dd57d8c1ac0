// Writes down what a call was fed and returned.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace decode_loop {

/// Tensors of a call by name.
using Tensors = std::vector<std::pair<std::string_view, Ort::ConstValue>>;

/// A call of a file of the model as a line of JSON.
std::string describe_call(const std::string& file, const Tensors& fed, const Tensors& got, const Ort::Status& status);

}  // namespace decode_loop
