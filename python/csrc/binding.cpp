// SPDX-License-Identifier: Apache-2.0
//
// The library as a torch operator, over LibTorch's stable ABI only: no at:: or c10:: type, no Python API.
//
//   convt3d_native::forward(...) -> Tensor?          the result, or none where no kernel takes the call
//   convt3d_native::forward_into(out, ...) -> bool   the same into `out`, such as a slice of a larger tensor
//   convt3d_native::quick(...) -> Tensor?            forward for eager calls: settings in one tensor, and what Python
//                                                    decides for forward is decided here
//   convt3d_native::quick_cat(skip, ...) -> Tensor?  the same beside a copy of `skip`: torch.cat([y, skip], 1)
//
// (backward.cpp has one more.) They never raise for a bad or unsupported call, and write nothing then: Python does the
// full validation, with torch's own error texts, and the fallback. They raise on CUDA errors and where memory runs out.
// They are registered for every backend at once, since a call that is not for this library has to answer "none" too.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "convt3d/convt3d_copy.h"
#include "convt3d/convt3d_launch.h"
#include "eager_rules.hpp"
#include "support.hpp"

namespace {

using namespace convt3d_torch;
using convt3d::binding::Settings;

struct Call {
  Tensor const& input;
  Tensor const& weight;
  std::optional<Tensor> const& bias;
  std::optional<Tensor> const& add;
  Settings const& settings;
  int64_t kernel;
  bool channels_last;  // of a result that is allocated here
  Tensor const* out = nullptr;
  Tensor const* skip = nullptr;  // the result holds this as well, in channels of its own
  bool skip_first = false;
};

// The result and where the convolution's part of it is: all of it, but for a concatenation.
struct Result {
  int64_t shape[kDims];
  int64_t stride[kDims];
  int64_t y_offset;     // elements
  int64_t skip_offset;  // the same of the skip's part
};

bool copy_triple(std::vector<int64_t> const& values, int64_t (&triple)[3]) {
  if (values.size() != 3) return false;
  std::copy(values.begin(), values.end(), triple);
  return true;
}

// False where a triple has another length.
bool collect(Settings& settings, std::vector<int64_t> const& stride, std::vector<int64_t> const& padding,
             std::vector<int64_t> const& output_padding, int64_t groups, std::vector<int64_t> const& dilation,
             int64_t add_order, int64_t activation, double negative_slope, int64_t precision) {
  settings.groups = groups;
  settings.activation = activation;
  settings.add_order = add_order;
  settings.precision = precision;
  settings.negative_slope = negative_slope;
  return copy_triple(stride, settings.stride) && copy_triple(padding, settings.padding) &&
         copy_triple(output_padding, settings.output_padding) && copy_triple(dilation, settings.dilation);
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

convt3d::binding::Dense dense(Tensor const& tensor) {
  convt3d::binding::Dense d{};
  auto const sizes = tensor.sizes();
  std::copy(sizes.begin(), sizes.begin() + kDims, d.shape);
  copy_strides(tensor, d.stride);
  return d;
}

// Strides of `add` expanded to the output's shape: 0 along broadcast dimensions. False where it does not broadcast.
bool broadcast_strides(Tensor const& add, int64_t const (&shape)[kDims], int64_t (&strides)[kDims]) {
  auto const sizes = add.sizes(), own_strides = add.strides();
  int64_t const dims = static_cast<int64_t>(sizes.size());
  if (dims > kDims) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    int64_t const own = dim - (kDims - dims);
    if (own < 0 || (sizes[own] == 1 && shape[dim] != 1)) {
      strides[dim] = 0;
    } else if (sizes[own] == shape[dim]) {
      strides[dim] = own_strides[own];
    } else {
      return false;
    }
  }
  return true;
}

// The bytes of a tensor; false where they do not fit 64 bits. Keeps dense_strides from overflowing.
bool bytes_of(int64_t const (&shape)[kDims], int64_t bytes) {
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent > 1 ? extent : 1, &bytes)) return false;
  }
  return true;
}

// Widens a result for the skip. False where the skip does not fit beside it.
bool add_skip(Call const& call, Result& result) {
  Tensor const& skip = *call.skip;
  if (skip.dim() != kDims) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    if (dim != 1 && skip.size(dim) != result.shape[dim]) return false;
    if (result.shape[dim] == 0 || skip.size(dim) == 0) return false;  // strides of torch's own making
  }
  // torch.cat's memory format: that of both parts. The strides of one value per sample are ambiguous.
  bool const several = result.shape[1] > 1 || result.shape[2] > 1 || result.shape[3] > 1 || result.shape[4] > 1;
  namespace rules = convt3d::binding;
  bool const channels_last = call.channels_last && several && rules::suggests_channels_last(dense(skip));
  int64_t const channels = result.shape[1];
  // An expanded skip has more values than memory.
  if (__builtin_add_overflow(channels, skip.size(1), &result.shape[1])) return false;
  if (!bytes_of(result.shape, static_cast<int64_t>(call.input.element_size()))) return false;
  dense_strides(result.shape, channels_last, result.stride);
  result.y_offset = call.skip_first ? skip.size(1) * result.stride[1] : 0;
  result.skip_offset = call.skip_first ? 0 : channels * result.stride[1];
  return true;
}

// Describes the call to the library; false where it cannot be described.
// What the description itself says wrong is the library's to find, except where this code already depends on it.
bool describe(Call const& call, convt3d_problem& problem, Result& result) {
  std::array<Tensor const*, 6> const tensors = {
      &call.input, &call.weight, call.bias ? &*call.bias : nullptr, call.add ? &*call.add : nullptr,
      call.out,    call.skip};
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
  auto const x_sizes = call.input.sizes(), weight_sizes = call.weight.sizes();
  if (x_sizes.size() != kDims || weight_sizes.size() != kDims) return false;

  Settings const& settings = call.settings;
  problem = {};
  problem.batch = x_sizes[0];
  problem.in_channels = x_sizes[1];
  problem.groups = settings.groups;
  // A transposed convolution's weight is (Cin, Cout / groups, kD, kH, kW).
  if (weight_sizes[0] != problem.in_channels) return false;
  if (__builtin_mul_overflow(weight_sizes[1], settings.groups, &problem.out_channels)) return false;
  for (int axis = 0; axis < 3; ++axis) {
    problem.in_size[axis] = x_sizes[2 + axis];
    problem.kernel[axis] = weight_sizes[2 + axis];
    problem.stride[axis] = settings.stride[axis];
    problem.padding[axis] = settings.padding[axis];
    problem.output_padding[axis] = settings.output_padding[axis];
    problem.dilation[axis] = settings.dilation[axis];
  }
  for (int64_t value : {settings.add_order, settings.activation, settings.precision, call.kernel}) {
    if (value < 0 || value > INT32_MAX) return false;
  }
  problem.dtype = *type;
  problem.precision = static_cast<int32_t>(settings.precision);
  problem.activation = static_cast<int32_t>(settings.activation);
  problem.add_order = static_cast<int32_t>(settings.add_order);
  problem.negative_slope = static_cast<float>(settings.negative_slope);

  int64_t out_size[3];
  if (convt3d_output_size(&problem, out_size, nullptr, 0) != CONVT3D_OK) return false;
  int64_t const shape[kDims] = {problem.batch, problem.out_channels, out_size[0], out_size[1], out_size[2]};
  int64_t const element = static_cast<int64_t>(call.input.element_size());
  result = {};
  std::memcpy(result.shape, shape, sizeof(shape));
  if (!bytes_of(result.shape, element)) return false;

  copy_strides(call.input, problem.x_stride);
  copy_strides(call.weight, problem.weight_stride);
  problem.x_alignment = alignment_of(call.input.const_data_ptr());
  problem.add_alignment = 16;
  if (call.out == nullptr) {
    if (call.skip == nullptr) {
      dense_strides(shape, call.channels_last, result.stride);
    } else if (!add_skip(call, result) || !bytes_of(result.shape, element)) {
      return false;
    }
    std::memcpy(problem.y_stride, result.stride, sizeof(result.stride));
    problem.y_alignment = alignment_within(result.y_offset * element);
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

// The copy of the skip into its part of the result; false where the library does not take it.
bool describe_copy(Call const& call, convt3d_problem const& problem, Result const& result, convt3d_copy& copy) {
  copy = {};
  for (int dim = 0; dim < kDims; ++dim) copy.size[dim] = call.skip->size(dim);
  copy_strides(*call.skip, copy.source_stride);
  std::memcpy(copy.target_stride, result.stride, sizeof(result.stride));
  copy.source_alignment = alignment_of(call.skip->const_data_ptr());
  copy.target_alignment = alignment_within(result.skip_offset * static_cast<int64_t>(call.skip->element_size()));
  copy.dtype = problem.dtype;
  return convt3d_copy_supported(&copy, nullptr, 0) == CONVT3D_OK;
}

// Plans on the current device. A status that is not OK comes with a message.
convt3d_status make_plan(Call const& call, convt3d_problem const& problem, convt3d_device& device, convt3d_plan& plan,
                         char* message) {
  convt3d_status const status = convt3d_current_device(&device, message, kMessageBytes);
  if (status != CONVT3D_OK) return status;
  return convt3d_make_plan(&problem, static_cast<convt3d_kernel>(call.kernel), &device, &plan, message, kMessageBytes);
}

// The result, or none.
std::optional<Tensor> run(Call const& call) {
  convt3d_problem problem;
  Result result;
  convt3d_copy copy;
  if (!describe(call, problem, result)) return std::nullopt;
  if (call.skip != nullptr && !describe_copy(call, problem, result, copy)) return std::nullopt;

  int32_t const index = call.input.get_device_index();
  // Most calls are for the current device: asking takes less than a guard. The driver is asked, since torch may have put
  // off the change to the device that it calls current.
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (convt3d_current_ordinal() != index) guard.emplace(index);
  convt3d_device device{};
  convt3d_plan plan{};
  char message[kMessageBytes] = "";
  convt3d_status status = make_plan(call, problem, device, plan, message);
  if (declined(status)) return std::nullopt;
  if (status != CONVT3D_OK) raise(status, message);

  // The workspace, however, comes from the device that torch calls current.
  if (plan.workspace_bytes > 0 && !guard && torch::stable::accelerator::getCurrentDeviceIndex() != index) {
    guard.emplace(index);
  }
  std::optional<Tensor> out = call.out != nullptr
                                  ? std::optional<Tensor>(*call.out)
                                  : empty_cuda(kDims, result.shape, result.stride, dtype_of(call.input), index);
  Workspace const workspace(out ? plan.workspace_bytes : 0, index);
  int64_t const element = static_cast<int64_t>(call.input.element_size());
  if (!out || workspace.failed()) {
    int64_t bytes = call.out != nullptr ? 0 : element;
    for (int64_t extent : result.shape) bytes *= extent;
    raise_out_of_memory(bytes, plan.workspace_bytes);
  }
  auto* const base = static_cast<unsigned char*>(out->mutable_data_ptr());
  convt3d_tensors tensors{};
  tensors.x = call.input.const_data_ptr();
  tensors.weight = call.weight.const_data_ptr();
  tensors.bias = call.bias ? call.bias->const_data_ptr() : nullptr;
  tensors.add = call.add ? call.add->const_data_ptr() : nullptr;
  tensors.y = base + result.y_offset * element;
  tensors.workspace = workspace.data();
  tensors.workspace_bytes = plan.workspace_bytes;
  // The plan relies on it, and an allocator of the user's own could break it.
  if (alignment_of(tensors.y) < problem.y_alignment) return std::nullopt;

  void* const stream = current_stream(index);
  status = convt3d_launch(&problem, &plan, &device, &tensors, stream, message, sizeof(message));
  if (status == CONVT3D_OK && call.skip != nullptr) {
    status = convt3d_copy_tensor(&copy, call.skip->const_data_ptr(), base + result.skip_offset * element, stream,
                                 message, sizeof(message));
  }
  if (declined(status)) return std::nullopt;
  if (status != CONVT3D_OK) raise(status, message);
  return out;
}

std::optional<Tensor> forward_op(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                                 std::vector<int64_t> const& stride, std::vector<int64_t> const& padding,
                                 std::vector<int64_t> const& output_padding, int64_t groups,
                                 std::vector<int64_t> const& dilation, std::optional<Tensor> const& add,
                                 int64_t add_order, int64_t activation, double negative_slope, int64_t precision,
                                 int64_t kernel, int64_t channels_last) {
  Settings settings;
  if (!collect(settings, stride, padding, output_padding, groups, dilation, add_order, activation, negative_slope,
               precision)) {
    return std::nullopt;
  }
  return run({input, weight, bias, add, settings, kernel, channels_last != 0});
}

bool forward_into_op(Tensor const& out, Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                     std::vector<int64_t> const& stride, std::vector<int64_t> const& padding,
                     std::vector<int64_t> const& output_padding, int64_t groups, std::vector<int64_t> const& dilation,
                     std::optional<Tensor> const& add, int64_t add_order, int64_t activation, double negative_slope,
                     int64_t precision, int64_t kernel) {
  Settings settings;
  return collect(settings, stride, padding, output_padding, groups, dilation, add_order, activation, negative_slope,
                 precision) &&
         run({input, weight, bias, add, settings, kernel, false, &out}).has_value();
}

// What the quick operators have in common. An integer argument costs 0.3 microseconds, a tensor 0.15: so all settings
// come as one tensor, made once.
std::optional<Tensor> run_quick(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                                std::optional<Tensor> const& add, Tensor const& packed, Tensor const* skip,
                                bool skip_first) {
  namespace rules = convt3d::binding;
  int64_t const kernel = rules::requested_kernel(std::getenv("CONVT3D_KERNEL"));
  if (kernel < 0 || !is_strided(input) || !is_strided(weight) || (skip != nullptr && !is_strided(*skip))) {
    return std::nullopt;
  }
  if (input.dim() != kDims || weight.dim() != kDims || input.numel() == 0) return std::nullopt;
  if (device_type_of(packed) != aoti_torch_device_type_cpu() || dtype_of(packed) != aoti_torch_dtype_int64() ||
      packed.numel() != rules::kSettings || !packed.is_contiguous()) {
    return std::nullopt;
  }
  Settings const settings = rules::read_settings(packed.const_data_ptr());
  bool const channels_last =
      rules::suggests_channels_last(dense(input)) || rules::suggests_channels_last(dense(weight));
  std::optional<Tensor> y = run({input, weight, bias, add, settings, kernel, channels_last, nullptr, skip, skip_first});
  // An empty output has strides of torch's own making, which only the registered operator asks torch for.
  if (y && y->numel() == 0) return std::nullopt;
  return y;
}

std::optional<Tensor> quick_op(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                               std::optional<Tensor> const& add, Tensor const& settings) {
  return run_quick(input, weight, bias, add, settings, nullptr, false);
}

std::optional<Tensor> quick_cat_op(Tensor const& skip, int64_t skip_first, Tensor const& input, Tensor const& weight,
                                   std::optional<Tensor> const& bias, std::optional<Tensor> const& add,
                                   Tensor const& settings) {
  return run_quick(input, weight, bias, add, settings, &skip, skip_first != 0);
}

}  // namespace

STABLE_TORCH_LIBRARY(convt3d_native, m) {
  m.def("quick(Tensor input, Tensor weight, Tensor? bias, Tensor? add, Tensor settings) -> Tensor?");
  m.def(
      "quick_cat(Tensor skip, int skip_first, Tensor input, Tensor weight, Tensor? bias, Tensor? add, Tensor settings) "
      "-> Tensor?");
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
  m.impl("quick_cat", TORCH_BOX(&quick_cat_op));
}
