#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

// SNIPPET
int main(int, char** argv) {
  Ort::Env env;
  Ort::Session session(env, argv[1], Ort::SessionOptions{});
  Ort::AllocatorWithDefaultOptions allocator;
  std::ofstream trace(argv[2]);
  std::vector<std::string> input_texts = session.GetInputNames(), output_texts = session.GetOutputNames();
  std::vector<const char*> input_names, output_names;
  for (const auto& name : input_texts) input_names.push_back(name.c_str());
  for (const auto& name : output_texts) output_names.push_back(name.c_str());
  std::vector<Ort::Value> outputs;
  for (std::int64_t step = 0; step < 4; ++step) {
    std::vector<Ort::Value> inputs;
    for (const auto& name : input_texts) {
      if (name.starts_with("past")) {
        if (step == 0) {
          const std::int64_t shape[] = {1, 2, 0, 8};
          inputs.push_back(Ort::Value::CreateTensor<float>(allocator, shape, 4));
        } else {
          const std::string present = "present" + name.substr(std::string("past_key_values").size());
          for (std::size_t i = 0; i < output_texts.size(); ++i) {
            if (output_texts[i] == present) inputs.push_back(std::move(outputs[i]));
          }
        }
        continue;
      }
      const std::int64_t shape[] = {1, name == "attention_mask" ? step + 1 : 1};
      inputs.push_back(Ort::Value::CreateTensor<std::int64_t>(allocator, shape, 2));
      for (std::int64_t i = 0; i < shape[1]; ++i) {
        inputs.back().GetTensorMutableData<std::int64_t>()[i] =
            name == "attention_mask" ? 1 : name == "position_ids" ? step : 5 + step;
      }
    }
    outputs = session.Run(Ort::RunOptions{}, input_names.data(), inputs.data(), inputs.size(), output_names.data(),
                          output_names.size());
    note(trace, input_names, inputs, output_names, outputs);
  }
}
