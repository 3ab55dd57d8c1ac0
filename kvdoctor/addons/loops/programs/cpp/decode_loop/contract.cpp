#include "decode_loop/contract.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

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

namespace {

using Names = std::set<std::string, std::less<>>;

constexpr std::string_view kSchema = "kvdoctor/loop/2";
const Names kRules{"tokens",         "token-and-position", "positions",   "rows",        "number",
                   "attention-mask", "padding-mask",       "window-mask", "causal-mask", "encoder-input",
                   "encoder-mask",   "encoder-states",     "embeddings"};
const Names kCarries{"feed-back", "append", "write", "shift", "drop-oldest"};

void refuse_unknown(const Names& known, const std::string& name, const std::string& rule) {
  if (known.contains(rule)) return;
  throw ContractError("\"" + name + "\" follows the rule \"" + rule + "\", which this program does not know");
}

}  // namespace

// The conversions that the library finds by the types.

static void from_json(const json& from, Dim& to) {
  if (from.is_number()) {
    from.get_to(to.size);
  } else {
    from.get_to(to.axis);
  }
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Input, name, dtype, dims, rule, count, value, shown, hidden, from_right, rows_from,
                                   batch_axis, made)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Fill, slot, output, carry)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EncoderSize, place, name, axis)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Call, file, inputs, pasts, outputs, logits, fills, encoder)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Calls, encode, embed, prefill, decode)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Slot, past, dtype, zeros, batch_axis, length_axis, rewinds, heads)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Port, dtype, dims)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(File, file, inputs, outputs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Generation, start, end, padding, suppress, begin_suppress, forced)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Contract, model, files, calls, slots, source, source_axis, vocabulary, context_limit,
                                   batch, one_token, capacity_is_chosen, pads, chunks, rewinds, reorders, placeholders,
                                   generation)

bool Call::has(std::string_view rule) const {
  return std::ranges::any_of(inputs, [rule](const Input& one) { return one.rule == rule; });
}

std::vector<const Call*> Calls::all() const {
  std::vector<const Call*> made{&prefill, &decode};
  if (encode) made.push_back(&*encode);
  if (embed) made.push_back(&*embed);
  return made;
}

Contract Contract::parse(std::string_view text) try {
  const json document = json::parse(text);
  if (document.at("schema") != kSchema) {
    throw ContractError("the schema is " + document.at("schema").dump() + ", and this program reads " +
                        std::string(kSchema));
  }
  auto contract = document.get<Contract>();
  for (const Call* call : contract.calls.all()) {
    for (const Input& one : call->inputs) refuse_unknown(kRules, one.name, one.rule);
    for (const Fill& one : call->fills) refuse_unknown(kCarries, one.output, one.carry);
  }
  return contract;
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
