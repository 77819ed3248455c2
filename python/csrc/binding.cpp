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
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "convt3d/convt3d_copy.h"
#include "convt3d/convt3d_launch.h"
#include "eager_rules.hpp"
#include "plans.hpp"
#include "support.hpp"
#include "tensor_view.hpp"

namespace {

namespace rules = convt3d::binding;
namespace stable = torch::stable::detail;
using namespace convt3d_torch;
using rules::Planned;
using rules::Settings;
using torch::stable::accelerator::DeviceGuard;

// Tensors by handle, borrowed. Null: there is none.
struct Call {
  AtenTensorHandle input;
  AtenTensorHandle weight;
  AtenTensorHandle bias;
  AtenTensorHandle add;
  Settings const& settings;
  int64_t kernel;
  AtenTensorHandle out = nullptr;   // null: the result is allocated here
  AtenTensorHandle skip = nullptr;  // the result holds this as well, in channels of its own
  bool skip_first = false;
  bool channels_last = false;  // of a result that is allocated here
};

// The same as described: CUDA tensors of one device and dtype.
struct Views {
  TensorView input, weight, bias, add, out, skip;
  int64_t element;  // bytes
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

// Strides of `add` expanded to the output's shape: 0 along broadcast dimensions. False where it does not broadcast.
bool broadcast_strides(TensorView const& add, int64_t const (&shape)[kDims], int64_t (&strides)[kDims]) {
  if (add.dims > kDims) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    int64_t const own = dim - (kDims - add.dims);
    if (own < 0 || (add.size[own] == 1 && shape[dim] != 1)) {
      strides[dim] = 0;
    } else if (add.size[own] == shape[dim]) {
      strides[dim] = add.stride[own];
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
bool add_skip(Call const& call, Views const& views, Result& result) {
  TensorView const& skip = views.skip;
  if (skip.dims != kDims) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    if (dim != 1 && skip.size[dim] != result.shape[dim]) return false;
    if (result.shape[dim] == 0 || skip.size[dim] == 0) return false;  // strides of torch's own making
  }
  // torch.cat's memory format: that of both parts. The strides of one value per sample are ambiguous.
  bool const several = result.shape[1] > 1 || result.shape[2] > 1 || result.shape[3] > 1 || result.shape[4] > 1;
  bool const channels_last = call.channels_last && several && rules::suggests_channels_last(skip.size, skip.stride);
  int64_t const channels = result.shape[1];
  // An expanded skip has more values than memory.
  if (__builtin_add_overflow(channels, skip.size[1], &result.shape[1])) return false;
  if (!bytes_of(result.shape, views.element)) return false;
  dense_strides(result.shape, channels_last, result.stride);
  result.y_offset = call.skip_first ? skip.size[1] * result.stride[1] : 0;
  result.skip_offset = call.skip_first ? 0 : channels * result.stride[1];
  return true;
}

// Looks at the tensors; false where they are not CUDA tensors of one device and dtype, input and weight of kDims
// dimensions.
bool look_at_all(Call const& call, Views& views) {
  int32_t const cuda = aoti_torch_device_type_cuda();
  auto const look = [&](AtenTensorHandle tensor, TensorView& view) {
    if (tensor == nullptr) return true;
    return look_at(tensor, view) && view.device_type == cuda && view.device_index == views.input.device_index &&
           view.dtype == views.input.dtype;
  };
  if (!look(call.input, views.input) || !look(call.weight, views.weight) || !look(call.bias, views.bias)) return false;
  if (!look(call.add, views.add) || !look(call.out, views.out) || !look(call.skip, views.skip)) return false;
  if (views.input.dims != kDims || views.weight.dims != kDims) return false;
  return true;
}

// Describes the call to the library; false where it cannot be described.
// What the description itself says wrong is the library's to find, except where this code already depends on it.
bool describe(Call const& call, Views& views, convt3d_problem& problem, Result& result) {
  std::optional<convt3d_dtype> const type = library_dtype(views.input.dtype);
  if (!type) return false;
  views.element = type == CONVT3D_F32 ? 4 : 2;
  Settings const& settings = call.settings;
  std::memset(&problem, 0, sizeof problem);  // all bytes, which Plans compares
  problem.batch = views.input.size[0];
  problem.in_channels = views.input.size[1];
  problem.groups = settings.groups;
  // A transposed convolution's weight is (Cin, Cout / groups, kD, kH, kW).
  if (views.weight.size[0] != problem.in_channels) return false;
  if (__builtin_mul_overflow(views.weight.size[1], settings.groups, &problem.out_channels)) return false;
  for (int axis = 0; axis < 3; ++axis) {
    problem.in_size[axis] = views.input.size[2 + axis];
    problem.kernel[axis] = views.weight.size[2 + axis];
    problem.stride[axis] = settings.stride[axis];
    problem.padding[axis] = settings.padding[axis];
    problem.output_padding[axis] = settings.output_padding[axis];
    problem.dilation[axis] = settings.dilation[axis];
  }
  for (int64_t value : {settings.add_order, settings.activation, settings.precision, call.kernel}) {
    if (value < 0 || value > INT32_MAX) return false;
  }
  problem.dtype = *type;
  // 16-bit types have one arithmetic, whatever the settings say of fp32.
  problem.precision = type == CONVT3D_F32 ? static_cast<int32_t>(settings.precision) : 0;
  problem.activation = static_cast<int32_t>(settings.activation);
  problem.add_order = static_cast<int32_t>(settings.add_order);
  problem.negative_slope = static_cast<float>(settings.negative_slope);

  int64_t out_size[3];
  if (convt3d_output_size(&problem, out_size, nullptr, 0) != CONVT3D_OK) return false;
  int64_t const shape[kDims] = {problem.batch, problem.out_channels, out_size[0], out_size[1], out_size[2]};
  result = {};
  std::memcpy(result.shape, shape, sizeof(shape));
  if (!bytes_of(result.shape, views.element)) return false;

  copy_strides(views.input, problem.x_stride);
  copy_strides(views.weight, problem.weight_stride);
  find_data(call.input, views.input);
  find_data(call.weight, views.weight);
  problem.x_alignment = alignment_of(views.input.data);
  problem.add_alignment = 16;
  if (call.out == nullptr) {
    if (call.skip == nullptr) {
      dense_strides(shape, call.channels_last, result.stride);
    } else if (!add_skip(call, views, result)) {
      return false;
    }
    std::memcpy(problem.y_stride, result.stride, sizeof(result.stride));
    problem.y_alignment = alignment_within(result.y_offset * views.element);
  } else {
    if (views.out.dims != kDims || !std::equal(shape, shape + kDims, views.out.size)) return false;
    copy_strides(views.out, problem.y_stride);
    find_data(call.out, views.out);
    problem.y_alignment = alignment_of(views.out.data);
  }
  if (call.bias != nullptr) {
    if (views.bias.dims != 1 || views.bias.size[0] != problem.out_channels) return false;
    problem.has_bias = 1;
    problem.bias_stride = views.bias.stride[0];
    find_data(call.bias, views.bias);
  }
  if (call.add != nullptr) {
    if (!broadcast_strides(views.add, shape, problem.add_stride)) return false;
    problem.has_add = 1;
    find_data(call.add, views.add);
    problem.add_alignment = alignment_of(views.add.data);
  }
  return true;
}

// The copy of the skip into its part of the result; false where the library does not take it.
bool describe_copy(Call const& call, Views& views, convt3d_problem const& problem, Result const& result,
                   convt3d_copy& copy) {
  copy = {};
  std::copy(views.skip.size, views.skip.size + kDims, copy.size);
  copy_strides(views.skip, copy.source_stride);
  std::memcpy(copy.target_stride, result.stride, sizeof(result.stride));
  find_data(call.skip, views.skip);
  copy.source_alignment = alignment_of(views.skip.data);
  copy.target_alignment = alignment_within(result.skip_offset * views.element);
  copy.dtype = problem.dtype;
  return convt3d_copy_supported(&copy, nullptr, 0) == CONVT3D_OK;
}

// The plan on the current device, whose ordinal is `index`. A status that is not OK comes with a message.
convt3d_status make_plan(convt3d_problem const& problem, int64_t kernel, int32_t index, Planned const*& planned,
                         char* message) {
  thread_local rules::Plans plans;
  planned = plans.find(problem, kernel, index);
  if (planned != nullptr) return CONVT3D_OK;
  Planned fresh;
  fresh.problem = problem;
  fresh.kernel = kernel;
  fresh.device_index = index;
  convt3d_status status = convt3d_current_device(&fresh.device, message, kMessageBytes);
  if (status == CONVT3D_OK) {
    status = convt3d_make_plan(&problem, static_cast<convt3d_kernel>(kernel), &fresh.device, &fresh.plan, message,
                               kMessageBytes);
  }
  if (status == CONVT3D_OK) planned = plans.keep(fresh);
  return status;
}

// Whether a kernel took the call. `y` gets the result, unless it is call.out.
bool run(Call const& call, Views& views, OwnedTensor& y) {
  convt3d_problem problem;
  Result result;
  convt3d_copy copy;
  if (!describe(call, views, problem, result)) return false;
  if (call.skip != nullptr && !describe_copy(call, views, problem, result, copy)) return false;

  int32_t const index = views.input.device_index;
  // Most calls are for the current device: asking takes less than a guard. The driver is asked, since torch may have
  // put off the change to the device that it calls current.
  std::unique_ptr<DeviceGuard> guard;
  if (convt3d_current_ordinal() != index) guard = std::make_unique<DeviceGuard>(index);
  Planned const* planned = nullptr;
  char message[kMessageBytes];
  message[0] = '\0';
  convt3d_status status = make_plan(problem, call.kernel, index, planned, message);
  if (declined(status)) return false;
  if (status != CONVT3D_OK) raise(status, message);
  size_t const workspace_bytes = planned->plan.workspace_bytes;

  // The workspace, however, comes from the device that torch calls current; and what is put off may come about while
  // torch allocates.
  if (!guard && torch::stable::accelerator::getCurrentDeviceIndex() != index) {
    guard = std::make_unique<DeviceGuard>(index);
  }
  if (call.out == nullptr) y = empty_cuda(kDims, result.shape, result.stride, views.input.dtype, index);
  AtenTensorHandle const out = call.out != nullptr ? call.out : y.get();
  Workspace const workspace(out != nullptr ? workspace_bytes : 0, index);
  if (out == nullptr || workspace.failed()) {
    int64_t bytes = call.out != nullptr ? 0 : views.element;
    for (int64_t extent : result.shape) bytes *= extent;
    raise_out_of_memory(bytes, workspace_bytes);
  }
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(out, &data));
  auto* const base = static_cast<unsigned char*>(data);
  convt3d_tensors tensors{};
  tensors.x = views.input.data;
  tensors.weight = views.weight.data;
  tensors.bias = call.bias != nullptr ? views.bias.data : nullptr;
  tensors.add = call.add != nullptr ? views.add.data : nullptr;
  tensors.y = base + result.y_offset * views.element;
  tensors.workspace = workspace.data();
  tensors.workspace_bytes = workspace_bytes;
  // The plan relies on it, and an allocator of the user's own could break it.
  if (alignment_of(tensors.y) < problem.y_alignment) return false;

  void* const stream = current_stream(index);
  status = convt3d_launch(&problem, &planned->plan, &planned->device, &tensors, stream, message, sizeof(message));
  if (status == CONVT3D_OK && call.skip != nullptr) {
    status = convt3d_copy_tensor(&copy, views.skip.data, base + result.skip_offset * views.element, stream, message,
                                 sizeof(message));
  }
  if (declined(status)) return false;
  if (status != CONVT3D_OK) raise(status, message);
  return true;
}

AtenTensorHandle handle_of(std::optional<Tensor> const& tensor) { return tensor ? tensor->get() : nullptr; }

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
  Call call{input.get(), weight.get(), handle_of(bias), handle_of(add), settings, kernel};
  call.channels_last = channels_last != 0;
  Views views;
  OwnedTensor y;
  if (!look_at_all(call, views) || !run(call, views, y)) return std::nullopt;
  return Tensor(y.release());
}

bool forward_into_op(Tensor const& out, Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                     std::vector<int64_t> const& stride, std::vector<int64_t> const& padding,
                     std::vector<int64_t> const& output_padding, int64_t groups, std::vector<int64_t> const& dilation,
                     std::optional<Tensor> const& add, int64_t add_order, int64_t activation, double negative_slope,
                     int64_t precision, int64_t kernel) {
  Settings settings;
  if (!collect(settings, stride, padding, output_padding, groups, dilation, add_order, activation, negative_slope,
               precision)) {
    return false;
  }
  Call call{input.get(), weight.get(), handle_of(bias), handle_of(add), settings, kernel};
  call.out = out.get();
  Views views;
  OwnedTensor y;
  return look_at_all(call, views) && run(call, views, y);
}

// What the quick operators have in common. An integer argument costs 0.3 microseconds, a tensor 0.15: so all settings
// come as one tensor, made once. Null where the call is not taken.
OwnedTensor run_quick(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias, AtenTensorHandle add,
                      AtenTensorHandle packed, AtenTensorHandle skip, bool skip_first) {
  int64_t const kernel = rules::requested_kernel(std::getenv("CONVT3D_KERNEL"));
  TensorView view;
  if (kernel < 0 || !look_at(packed, view)) return nullptr;
  if (view.device_type != aoti_torch_device_type_cpu() || view.dtype != aoti_torch_dtype_int64() || view.dims != 1 ||
      view.size[0] != rules::kSettings || view.stride[0] != 1) {
    return nullptr;
  }
  find_data(packed, view);
  Settings const settings = rules::read_settings(view.data);
  Call call{input, weight, bias, add, settings, kernel, nullptr, skip, skip_first};
  Views views;
  if (!look_at_all(call, views)) return nullptr;
  for (int dim = 0; dim < kDims; ++dim) {
    if (views.input.size[dim] == 0) return nullptr;
  }
  call.channels_last = rules::suggests_channels_last(views.input.size, views.input.stride) ||
                       rules::suggests_channels_last(views.weight.size, views.weight.stride);
  OwnedTensor y;
  if (!run(call, views, y)) return nullptr;
  // An empty output has strides of torch's own making, which only the registered operator asks torch for.
  int64_t count = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(y.get(), &count));
  return count == 0 ? nullptr : std::move(y);
}

// TORCH_BOX for the quick operators, without torch::stable::Tensor.
OwnedTensor take(StableIValue value) { return OwnedTensor(stable::to<AtenTensorHandle>(value)); }

OwnedTensor take_optional(StableIValue value) {
  return OwnedTensor(stable::to<std::optional<AtenTensorHandle>>(value).value_or(nullptr));
}

StableIValue give_optional(OwnedTensor tensor) {
  return tensor ? stable::from(std::optional<AtenTensorHandle>(tensor.release())) : stable::from(std::nullopt);
}

void quick_op(StableIValue* stack, uint64_t, uint64_t) {
  OwnedTensor const input = take(stack[0]), weight = take(stack[1]);
  OwnedTensor const bias = take_optional(stack[2]), add = take_optional(stack[3]);
  OwnedTensor const settings = take(stack[4]);
  stack[0] = give_optional(run_quick(input.get(), weight.get(), bias.get(), add.get(), settings.get(), nullptr, false));
}

void quick_cat_op(StableIValue* stack, uint64_t, uint64_t) {
  OwnedTensor const skip = take(stack[0]);
  bool const skip_first = stable::to<int64_t>(stack[1]) != 0;
  OwnedTensor const input = take(stack[2]), weight = take(stack[3]);
  OwnedTensor const bias = take_optional(stack[4]), add = take_optional(stack[5]);
  OwnedTensor const settings = take(stack[6]);
  stack[0] = give_optional(
      run_quick(input.get(), weight.get(), bias.get(), add.get(), settings.get(), skip.get(), skip_first));
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
  m.impl("quick", &quick_op);
  m.impl("quick_cat", &quick_cat_op);
}
