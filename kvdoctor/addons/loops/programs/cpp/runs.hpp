// Plays a file of runs, and writes what their calls were fed and returned.
#pragma once

#include <filesystem>

#include "decode_loop/decoder.hpp"

namespace decode_loop {

/// Plays all runs of a file, and writes the trace; whether all tokens are as expected.
bool play(Decoder& decoder, const std::filesystem::path& runs, const std::filesystem::path& file);

/// Gives a source of float32, little endian, to the decoder.
void encode_file(Decoder& decoder, const std::filesystem::path& file, const Shape& shape);

/// Numbers with commas between them.
std::string listed(const std::vector<std::int64_t>& numbers);

}  // namespace decode_loop
