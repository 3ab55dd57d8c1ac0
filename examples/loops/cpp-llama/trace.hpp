// Writes calls down, for `kvdoctor step-test MODEL --trace FILE`.

#pragma once

#include <onnxruntime_cxx_api.h>

#include <filesystem>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// The tensors that a call was fed, or returned, by their names.
using Tensors = std::vector<std::pair<std::string_view, Ort::ConstValue>>;

/// A file that gets a line of JSON for each call: shapes, the data of small tensors and samples of larger ones.
struct Trace {
  std::filesystem::path file;
  /// The run that the calls belong to, with which their lines begin; empty where they belong to none.
  std::string run;

  /// Adds a call of a file of the model.
  void note(std::string_view model, const Tensors& fed, const Tensors& got, const Ort::Status& status) const;
};

/// Writes a text as a JSON string.
void write_json(std::ostream& out, std::string_view text);
