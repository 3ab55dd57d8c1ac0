#include "decode_loop/contract.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>

#include "decode_loop/json.hpp"

namespace decode_loop {

namespace {

constexpr std::string_view kSchema = "kvdoctor/loop/2";

// Names in the order of their enums.
constexpr std::array<std::string_view, 8> kAxes{"batch", "batch_heads", "new",     "past",
                                                "total", "capacity",    "encoder", "encoder_input"};
constexpr std::array<std::string_view, 13> kRules{
    "tokens",        "token-and-position", "embeddings",    "attention-mask", "padding-mask",
    "window-mask",   "causal-mask",        "positions",     "rows",           "number",
    "encoder-input", "encoder-mask",       "encoder-states"};
constexpr std::array<std::string_view, 10> kCounts{"constant", "past",  "total",  "last",  "new",
                                                   "last-new", "batch", "cached", "first", "encoder_input"};
constexpr std::array<std::string_view, 6> kCarries{"feed-back", "hold", "append", "write", "shift", "drop-oldest"};
constexpr std::array<std::pair<std::string_view, ONNXTensorElementDataType>, 9> kTypes{{
    {"float", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16},
    {"double", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
    {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
}};

/// A field of an input or slot that is one of a list of names.
template <typename Enum, std::size_t size>
Enum one_of(const std::array<std::string_view, size>& names, const Json& json, std::string_view field,
            std::string_view owner) {
  const std::string& text = json.at(field).text();
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    throw ContractError("\"" + std::string(owner) + "\" has the " + std::string(field) + " \"" + text +
                        "\", which this program does not know");
  }
  return static_cast<Enum>(found - names.begin());
}

ONNXTensorElementDataType type_of(const Json& json) {
  const std::string& name = json.at("dtype").text();
  for (const auto& [known, type] : kTypes) {
    if (known == name) return type;
  }
  throw ContractError("there is no element type \"" + name + "\" here");
}

Dims dims_of(const Json& json) {
  Dims dims;
  for (const Json& one : json.at("dims").list()) {
    if (one.is_number()) {
      dims.push_back(one.integer());
    } else {
      dims.push_back(kBatch + (std::find(kAxes.begin(), kAxes.end(), one.text()) - kAxes.begin()));
    }
  }
  return dims;
}

std::string text_of(const Json& json) { return json.is_null() ? std::string() : json.text(); }

std::vector<std::string> texts_of(const Json& json) {
  std::vector<std::string> made;
  for (const Json& one : json.list()) made.push_back(one.text());
  return made;
}

template <typename T>
std::optional<T> optional_of(const Json& json) {
  return json.is_null() ? std::nullopt : std::optional<T>(static_cast<T>(json.integer()));
}

std::int64_t axis_of(const Json& json) { return json.is_null() ? -1 : json.integer(); }

Input input_of(const Json& json) {
  const std::string& name = json.at("name").text();
  return {.name = name,
          .type = type_of(json),
          .dims = dims_of(json),
          .rule = one_of<Rule>(kRules, json, "rule", name),
          .count = one_of<Count>(kCounts, json, "count", name),
          .value = json.at("value").number(),
          .shown = json.at("shown").number(),
          .hidden = json.at("hidden").number(),
          .from_right = json.at("from_right").boolean(),
          .made = text_of(json.at("made"))};
}

Call call_of(const Json& json) {
  Call call{.file = json.at("file").text(),
            .inputs = {},
            .pasts = texts_of(json.at("pasts")),
            .outputs = texts_of(json.at("outputs")),
            .logits = text_of(json.at("logits")),
            .states = text_of(json.at("states"))};
  for (const Json& one : json.at("inputs").list()) call.inputs.push_back(input_of(one));
  return call;
}

Slot slot_of(const Json& json) {
  const std::string& past = json.at("past").text();
  return {.past = past,
          .present = text_of(json.at("present")),
          .made = text_of(json.at("made")),
          .by_encoder = json.at("by_encoder").boolean(),
          .type = type_of(json),
          .dims = dims_of(json),
          .carry = one_of<Carry>(kCarries, json, "carry", past),
          .batch_axis = axis_of(json.at("batch_axis")),
          .length_axis = axis_of(json.at("length_axis")),
          .counts_states = json.at("counts_states").boolean(),
          .cut = json.at("rewinds").text() == "cut",
          .first_length = json.at("first_length").integer(),
          .heads = json.at("heads").integer(),
          .fed_zeros = json.at("fed_zeros").boolean()};
}

File file_of(const Json& json) {
  File file{.file = json.at("file").text(), .inputs = {}, .outputs = texts_of(json.at("outputs"))};
  for (const auto& [name, port] : json.at("inputs").object()) {
    file.inputs.push_back({.name = name, .type = type_of(port), .dims = dims_of(port)});
  }
  return file;
}

Generation generation_of(const Json& json) {
  Generation made{.start = json.at("start").integers(),
                  .end = json.at("end").integers(),
                  .padding = optional_of<std::int64_t>(json.at("padding")),
                  .suppress = json.at("suppress").integers(),
                  .begin_suppress = json.at("begin_suppress").integers(),
                  .forced = {}};
  for (const Json& pair : json.at("forced").list()) {
    const auto numbers = pair.integers();
    made.forced.emplace_back(static_cast<std::size_t>(numbers.at(0)), numbers.at(1));
  }
  return made;
}

Contract contract_of(const Json& json) {
  if (json.at("schema").text() != kSchema) {
    throw ContractError("the schema is " + json.at("schema").text() + ", and this program reads " +
                        std::string(kSchema));
  }
  const Json& calls = json.at("calls");
  const auto optional_call = [](const Json& one) {
    return one.is_null() ? std::nullopt : std::optional<Call>(call_of(one));
  };
  const Json& source = json.at("source");
  Contract made{.model = json.at("model").text(),
                .files = {},
                .encode = optional_call(calls.at("encode")),
                .embed = optional_call(calls.at("embed")),
                .prefill = call_of(calls.at("prefill")),
                .decode = call_of(calls.at("decode")),
                .slots = {},
                .source = source.is_null() ? std::nullopt : std::optional<Input>(input_of(source)),
                .vocabulary = optional_of<std::int64_t>(json.at("vocabulary")),
                .context_limit = optional_of<std::int64_t>(json.at("context_limit")),
                .batch = optional_of<std::size_t>(json.at("batch")),
                .one_token = json.at("one_token").boolean(),
                .capacity_is_chosen = json.at("capacity_is_chosen").boolean(),
                .pads = json.at("pads").boolean(),
                .chunks = json.at("chunks").boolean(),
                .rewinds = json.at("rewinds").boolean(),
                .reorders = json.at("reorders").boolean(),
                .placeholders = {},
                .generation = generation_of(json.at("generation"))};
  if (const Json& ids = json.get("placeholders"); !ids.is_null()) made.placeholders = ids.integers();
  for (const Json& one : json.at("files").list()) made.files.push_back(file_of(one));
  for (const Json& one : json.at("slots").list()) made.slots.push_back(slot_of(one));
  return made;
}

}  // namespace

bool Call::has(Rule rule) const {
  return std::any_of(inputs.begin(), inputs.end(), [rule](const Input& one) { return one.rule == rule; });
}

Contract Contract::parse(std::string_view text) try {
  return contract_of(Json::parse(text));
} catch (const std::logic_error& error) {
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

std::vector<const Call*> Contract::calls() const {
  std::vector<const Call*> all;
  if (encode) all.push_back(&*encode);
  if (embed) all.push_back(&*embed);
  all.push_back(&prefill);
  all.push_back(&decode);
  return all;
}

bool Contract::source_is_ids() const {
  return source &&
         (source->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 || source->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
}

}  // namespace decode_loop
