// Writes down what the loop fed and got, a line of JSON for each call: kvdoctor step-test MODEL --trace FILE.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <filesystem>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace decode_loop {

/// Tensors of a call by name.
using Tensors = std::vector<std::pair<std::string_view, Ort::ConstValue>>;

/// Where the lines go; without a file nothing is written. Where several runs go into it, each has its name.
struct Trace {
  std::filesystem::path file;
  std::string run;

  /// Writes down one call of a file of the model.
  void note(std::string_view model, const Tensors& fed, const Tensors& got, const Ort::Status& status) const;
};

/// Writes a string of JSON.
void write_json(std::ostream& out, std::string_view text);

}  // namespace decode_loop
