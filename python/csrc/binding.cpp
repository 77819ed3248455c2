// SPDX-License-Identifier: Apache-2.0
//
// The library as a torch operator, over LibTorch's stable ABI only: no at:: or c10:: type, no Python API.
//
//   convt3d_native::forward(...) -> Tensor?          the result, or none where no kernel takes the call
//   convt3d_native::forward_into(out, ...) -> bool   the same into `out`, such as a slice of a larger tensor
//   convt3d_native::quick(...) -> Tensor?            forward for eager calls: packed arguments, and it decides itself
//                                                    what Python decides for forward
//
// (backward.cpp has one more.) They never raise for a bad or unsupported call, and write nothing then: Python does the
// full validation, with torch's own error texts, and the fallback. They raise on CUDA errors and where memory runs out.
// They are registered for every backend at once, since a call that is not for this library has to answer "none" too.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "eager_rules.hpp"
#include "support.hpp"

namespace {

using namespace convt3d_torch;

struct Call {
  Tensor const& input;
  Tensor const& weight;
  std::optional<Tensor> const& bias;
  std::vector<int64_t> const& stride;
  std::vector<int64_t> const& padding;
  std::vector<int64_t> const& output_padding;
  int64_t groups;
  std::vector<int64_t> const& dilation;
  std::optional<Tensor> const& add;
  int64_t add_order;
  int64_t activation;
  double negative_slope;
  int64_t precision;
  int64_t kernel;
  bool channels_last;  // of a result that is allocated here
  Tensor const* out = nullptr;
};

bool copy_triple(std::vector<int64_t> const& values, int64_t (&triple)[3]) {
  if (values.size() != 3) return false;
  for (int axis = 0; axis < 3; ++axis) triple[axis] = values[axis];
  return true;
}

// The strides of a dense tensor of this shape, as torch gives them: a size of 0 counts as 1.
void dense_strides(int64_t const (&shape)[kDims], bool channels_last, int64_t (&strides)[kDims]) {
  static constexpr int kContiguous[kDims] = {4, 3, 2, 1, 0};
  static constexpr int kChannelsLast[kDims] = {1, 4, 3, 2, 0};
  int64_t next = 1;
  for (int dim : channels_last ? kChannelsLast : kContiguous) {
    strides[dim] = next;
    next *= shape[dim] > 1 ? shape[dim] : 1;
  }
}

// Strides of `add` expanded to the output's shape: 0 along broadcast dimensions. False where it does not broadcast.
bool broadcast_strides(Tensor const& add, int64_t const (&shape)[kDims], int64_t (&strides)[kDims]) {
  int64_t const dims = add.dim();
  if (dims > kDims) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    int64_t const own = dim - (kDims - dims);
    if (own < 0 || (add.size(own) == 1 && shape[dim] != 1)) {
      strides[dim] = 0;
    } else if (add.size(own) == shape[dim]) {
      strides[dim] = add.stride(own);
    } else {
      return false;
    }
  }
  return true;
}

// Describes the call to the library; false where it cannot be described.
// What the description itself says wrong is the library's to find, except where this code already depends on it.
bool describe(Call const& call, convt3d_problem& problem, int64_t (&y_shape)[kDims]) {
  std::array<Tensor const*, 5> const tensors = {&call.input, &call.weight, call.bias ? &*call.bias : nullptr,
                                                call.add ? &*call.add : nullptr, call.out};
  int32_t const dtype = dtype_of(call.input);
  int32_t const device = call.input.get_device_index();
  for (Tensor const* tensor : tensors) {
    if (tensor == nullptr) continue;
    if (device_type_of(*tensor) != aoti_torch_device_type_cuda()) return false;
    if (tensor->get_device_index() != device) return false;
    if (!is_strided(*tensor)) return false;
    if (dtype_of(*tensor) != dtype) return false;
  }
  std::optional<convt3d_dtype> const type = library_dtype(dtype);
  if (!type) return false;
  if (call.input.dim() != kDims || call.weight.dim() != kDims) return false;

  problem = {};
  problem.batch = call.input.size(0);
  problem.in_channels = call.input.size(1);
  problem.groups = call.groups;
  // A transposed convolution's weight is (Cin, Cout / groups, kD, kH, kW).
  if (call.weight.size(0) != problem.in_channels) return false;
  if (__builtin_mul_overflow(call.weight.size(1), call.groups, &problem.out_channels)) return false;
  for (int axis = 0; axis < 3; ++axis) {
    problem.in_size[axis] = call.input.size(2 + axis);
    problem.kernel[axis] = call.weight.size(2 + axis);
  }
  if (!copy_triple(call.stride, problem.stride) || !copy_triple(call.padding, problem.padding) ||
      !copy_triple(call.output_padding, problem.output_padding) || !copy_triple(call.dilation, problem.dilation)) {
    return false;
  }
  for (int64_t value : {call.add_order, call.activation, call.precision, call.kernel}) {
    if (value < 0 || value > INT32_MAX) return false;
  }
  problem.dtype = *type;
  problem.precision = static_cast<int32_t>(call.precision);
  problem.activation = static_cast<int32_t>(call.activation);
  problem.add_order = static_cast<int32_t>(call.add_order);
  problem.negative_slope = static_cast<float>(call.negative_slope);

  int64_t out_size[3];
  if (convt3d_output_size(&problem, out_size, nullptr, 0) != CONVT3D_OK) return false;
  int64_t const shape[kDims] = {problem.batch, problem.out_channels, out_size[0], out_size[1], out_size[2]};
  int64_t bytes = static_cast<int64_t>(call.input.element_size());
  for (int dim = 0; dim < kDims; ++dim) {
    y_shape[dim] = shape[dim];
    // Keeps dense_strides from overflowing.
    if (shape[dim] < 0 || __builtin_mul_overflow(bytes, shape[dim] > 1 ? shape[dim] : 1, &bytes)) {
      return false;
    }
  }

  copy_strides(call.input, problem.x_stride);
  copy_strides(call.weight, problem.weight_stride);
  problem.x_alignment = alignment_of(call.input.const_data_ptr());
  problem.add_alignment = 16;
  if (call.out == nullptr) {
    dense_strides(shape, call.channels_last, problem.y_stride);
    problem.y_alignment = 16;  // torch's allocators give more
  } else {
    if (call.out->dim() != kDims) return false;
    for (int dim = 0; dim < kDims; ++dim) {
      if (call.out->size(dim) != shape[dim]) return false;
    }
    copy_strides(*call.out, problem.y_stride);
    problem.y_alignment = alignment_of(call.out->const_data_ptr());
  }
  if (call.bias) {
    if (call.bias->dim() != 1 || call.bias->size(0) != problem.out_channels) return false;
    problem.has_bias = 1;
    problem.bias_stride = call.bias->stride(0);
  }
  if (call.add) {
    if (!broadcast_strides(*call.add, shape, problem.add_stride)) return false;
    problem.has_add = 1;
    problem.add_alignment = alignment_of(call.add->const_data_ptr());
  }
  return true;
}

// What the library says of device `index`, which is the current one. Asked once per device: properties are slow.
convt3d_status device_of(int32_t index, convt3d_device& device, char* message) {
  static std::array<std::atomic<uint64_t>, 64> known{};
  bool const cacheable = index >= 0 && index < static_cast<int32_t>(known.size());
  if (cacheable) {
    uint64_t const packed = known[index].load(std::memory_order_relaxed);
    if (packed != 0) {
      device = {static_cast<int32_t>(packed >> 32), static_cast<int32_t>(packed & UINT32_MAX)};
      return CONVT3D_OK;
    }
  }
  convt3d_status const status = convt3d_current_device(&device, message, kMessageBytes);
  if (status == CONVT3D_OK && cacheable) {
    uint64_t const packed = static_cast<uint64_t>(static_cast<uint32_t>(device.compute_capability)) << 32 |
                            static_cast<uint32_t>(device.multiprocessors);
    known[index].store(packed, std::memory_order_relaxed);
  }
  return status;
}

// Plans on the current device. A status that is not OK comes with a message.
convt3d_status make_plan(Call const& call, convt3d_problem const& problem, convt3d_plan& plan, char* message) {
  convt3d_device device{};
  convt3d_status const status = device_of(call.input.get_device_index(), device, message);
  if (status != CONVT3D_OK) return status;
  return convt3d_make_plan(&problem, static_cast<convt3d_kernel>(call.kernel), &device, &plan, message, kMessageBytes);
}

// The result, or none.
std::optional<Tensor> run(Call const& call) {
  convt3d_problem problem;
  int64_t shape[kDims];
  if (!describe(call, problem, shape)) return std::nullopt;

  int32_t const index = call.input.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(index);
  convt3d_plan plan{};
  char message[kMessageBytes] = "";
  convt3d_status status = make_plan(call, problem, plan, message);
  if (declined(status)) return std::nullopt;
  if (status != CONVT3D_OK) raise(status, message);

  std::optional<Tensor> y = call.out != nullptr
                                ? std::optional<Tensor>(*call.out)
                                : empty_cuda({shape, shape + kDims}, {problem.y_stride, problem.y_stride + kDims},
                                             dtype_of(call.input), index);
  Workspace const workspace(y ? plan.workspace_bytes : 0, index);
  if (!y || workspace.failed()) {
    int64_t bytes = call.out != nullptr ? 0 : static_cast<int64_t>(call.input.element_size());
    for (int64_t extent : shape) bytes *= extent;
    raise_out_of_memory(bytes, plan.workspace_bytes);
  }
  convt3d_tensors tensors{};
  tensors.x = call.input.const_data_ptr();
  tensors.weight = call.weight.const_data_ptr();
  tensors.bias = call.bias ? call.bias->const_data_ptr() : nullptr;
  tensors.add = call.add ? call.add->const_data_ptr() : nullptr;
  tensors.y = y->mutable_data_ptr();
  tensors.workspace = workspace.data();
  tensors.workspace_bytes = plan.workspace_bytes;
  // The plan relies on it, and an allocator of the user's own could break it.
  if (alignment_of(tensors.y) < problem.y_alignment) return std::nullopt;

  status = convt3d_forward(&problem, &plan, &tensors, current_stream(index), message, sizeof(message));
  if (declined(status)) return std::nullopt;
  if (status != CONVT3D_OK) raise(status, message);
  return y;
}

std::optional<Tensor> forward_op(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                                 std::vector<int64_t> const& stride, std::vector<int64_t> const& padding,
                                 std::vector<int64_t> const& output_padding, int64_t groups,
                                 std::vector<int64_t> const& dilation, std::optional<Tensor> const& add,
                                 int64_t add_order, int64_t activation, double negative_slope, int64_t precision,
                                 int64_t kernel, int64_t channels_last) {
  return run({input, weight, bias, stride, padding, output_padding, groups, dilation, add, add_order, activation,
              negative_slope, precision, kernel, channels_last != 0});
}

bool forward_into_op(Tensor const& out, Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                     std::vector<int64_t> const& stride, std::vector<int64_t> const& padding,
                     std::vector<int64_t> const& output_padding, int64_t groups, std::vector<int64_t> const& dilation,
                     std::optional<Tensor> const& add, int64_t add_order, int64_t activation, double negative_slope,
                     int64_t precision, int64_t kernel) {
  return run({input, weight, bias, stride, padding, output_padding, groups, dilation, add, add_order, activation,
              negative_slope, precision, kernel, false, &out})
      .has_value();
}

// A list argument costs about as much as five numbers, so (D, H, W) comes as one: convt3d::binding::unpack.
std::optional<Tensor> quick_op(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                               std::optional<Tensor> const& add, int64_t stride, int64_t padding,
                               int64_t output_padding, int64_t groups, int64_t dilation, int64_t options,
                               double negative_slope) {
  namespace rules = convt3d::binding;
  int64_t const kernel = rules::requested_kernel(std::getenv("CONVT3D_KERNEL"));
  if (kernel < 0 || !is_strided(input) || !is_strided(weight)) return std::nullopt;
  if (input.dim() != kDims || weight.dim() != kDims || input.numel() == 0) return std::nullopt;
  rules::Dense const x = rules::dense(input), w = rules::dense(weight);
  bool const channels_last = rules::suggests_channels_last(x) || rules::suggests_channels_last(w);
  std::optional<Tensor> y =
      run({input, weight, bias, rules::unpack(stride), rules::unpack(padding), rules::unpack(output_padding), groups,
           rules::unpack(dilation), add, rules::add_order(options), rules::activation(options), negative_slope,
           rules::precision(options), kernel, channels_last});
  // An empty output has strides of torch's own making, which only the registered operator asks torch for.
  if (y && y->numel() == 0) return std::nullopt;
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(convt3d_native, m) {
  m.def(
      "quick(Tensor input, Tensor weight, Tensor? bias, Tensor? add, int stride, int padding, int output_padding, "
      "int groups, int dilation, int options, float negative_slope) -> Tensor?");
  m.def(
      "forward(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, "
      "int groups, int[] dilation, Tensor? add, int add_order, int activation, float negative_slope, int precision, "
      "int kernel, int channels_last) -> Tensor?");
  m.def(
      "forward_into(Tensor(a!) out, Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "int[] output_padding, int groups, int[] dilation, Tensor? add, int add_order, int activation, "
      "float negative_slope, int precision, int kernel) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(convt3d_native, CompositeExplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("forward_into", TORCH_BOX(&forward_into_op));
  m.impl("quick", TORCH_BOX(&quick_op));
}
