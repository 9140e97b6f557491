// Generators: a seed and an offset that moves when work is issued, as CUDA's; what a kernel draws depends on both.
#pragma once
#include <ATen/core/Generator.h>

#include <optional>

namespace sim {
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// A generator of the CPU for one kernel; moves the offset of the given one, or of the device's own.
at::Generator draw(int device, const std::optional<at::Generator>& given);
void generator_state(int device, uint64_t* state, bool is_set);
}  // namespace sim
