// Kernels: any op of torch, run on CPU tensors over the device's bytes, in stream order.
//
// An op is issued in three steps: meta tensors tell what its results look like, those are allocated, and a task gets
// the CPU's kernel with aliases of all tensors. An op that meta tensors can't answer (nonzero, equal) waits for the
// device, as on a GPU. A task owns no tensor that Python knows, and must not need Python's lock: an op whose kernel for
// the CPU is written in Python (torch.library) can't run here; one written for all devices is taken apart at issue.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>

#include "streams.h"

namespace sim {
bool is_sim(const at::Tensor& t);
at::Tensor alias_of(const at::Tensor& t);  // a CPU tensor over the same bytes; a clone of a tensor of the host
at::Tensor device_like(const at::Tensor& t, int device);
void launch(int device, const std::string& name, const Cost& cost, std::function<void()> run);  // on the current stream
void run_and_wait(int device, const std::string& name, Call call, std::function<void()> run);
double nbytes_of(const at::Tensor& t);
Rate rate_of(at::ScalarType dtype);
// Floating-point operations of a product or convolution; 0 for other ops.
double flops_of(const std::string& name, const torch::jit::Stack& args, const torch::jit::Stack& results);
std::string op_counts(bool waiting);  // "name count" a line
}  // namespace sim
