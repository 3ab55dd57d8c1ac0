#include "decode_loop/contract.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

using nlohmann::json;

NLOHMANN_JSON_SERIALIZE_ENUM(ONNXTensorElementDataType, {
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, nullptr},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "float"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "float16"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, "bfloat16"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, "double"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, "int64"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "int32"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "int8"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "uint8"},
                                                            {ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, "bool"},
                                                        })

/// A member that may be null.
template <typename T>
struct nlohmann::adl_serializer<std::optional<T>> {
  static void from_json(const json& from, std::optional<T>& to) {
    if (!from.is_null()) to = from.get<T>();
  }
};

namespace decode_loop {

static constexpr std::string_view kSchema = "kvdoctor/loop/4";

// The conversions that the library finds by the types.

static void from_json(const json& from, Dim& to) {
  if (from.is_number()) {
    from.get_to(to.size);
  } else {
    from.get_to(to.axis);
  }
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Made, name, dtype, dims, batch_axis, copy, begin, end, inside, outside, step)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Take, output, value, carry, axis)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Axis, value, axis, each)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Call, file, values, made, outputs, logits, takes, sizes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Zeros, value, dtype, dims)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Source, dtype, dims, batch_axis, length_axis, masked)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Port, dtype, shape)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(File, file, inputs, outputs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Generation, start, end, suppress, begin_suppress, forced)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Contract, model, files, calls, zeros, cut, rows, heads, source, vocabulary,
                                   context_limit, longest, batch, one_token, capacity_is_chosen, pads, chunks, rewinds,
                                   reorders, placeholders, generation)

Contract Contract::parse(std::string_view text) try {
  const json document = json::parse(text);
  if (document.at("schema") != kSchema) {
    throw ContractError("the schema is " + document.at("schema").dump() + ", and this program reads " +
                        std::string(kSchema));
  }
  return document.get<Contract>();
} catch (const json::exception& error) {
  throw ContractError(error.what());
}

Contract Contract::read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw ContractError(file.string() + " cannot be read");
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  try {
    return parse(text);
  } catch (const ContractError& error) {
    throw ContractError(file.string() + ": " + error.what());
  }
}

}  // namespace decode_loop
