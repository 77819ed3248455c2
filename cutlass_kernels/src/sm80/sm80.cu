// SPDX-License-Identifier: Apache-2.0
//
// The sm80 family behind the library's Family interface: what it supports, its workspace, and a run: pre-pass, then
// the kernel that select.hpp chose. Patch expansion and groups of few channels have kernels that read x where it lies.
#include <algorithm>

#include "dispatch.hpp"
#include "sm80/columns/geometry.hpp"
#include "sm80/columns/instances.hpp"
#include "sm80/conditional.hpp"
#include "sm80/estimate.hpp"
#include "sm80/grouped/grouped.hpp"
#include "sm80/joint/geometry.hpp"
#include "sm80/operands.hpp"
#include "sm80/patch/geometry.hpp"
#include "sm80/select.hpp"

namespace convt3d::sm80 {
namespace {

Status supported(Problem const& p, convt3d_device const& device, Message& message) {
  auto const no = [&](char const* what, int64_t value, char const* limit) {
    return message.fail(CONVT3D_NOT_SUPPORTED, "sm80: %s is %lld, the kernel takes %s", what,
                        static_cast<long long>(value), limit);
  };
  if (device.compute_capability < 80) return no("compute capability", device.compute_capability, "80 and above");
  if (p.groups != 1) return grouped::supported(p, message);
  for (int64_t s : p.stride) {
    if (s > prepare::kMaxClasses) return no("a stride", s, "a product of strides of at most 64");
  }
  int64_t const classes = residue_class_count(p.stride);
  if (classes > prepare::kMaxClasses) return no("the product of the strides", classes, "at most 64");

  int const bytes = element_bytes(p);
  for (int64_t channels : {p.in_channels, p.out_channels}) {
    if (channels > kMaxChannels) return no("a channel count", channels, "at most 2^20");
  }
  int64_t const k_channels = padded_channels(p.in_channels, bytes);
  int64_t const c_channels = padded_channels(p.out_channels, bytes);
  int64_t class_taps = 1;
  for (int axis = 0; axis < 3; ++axis) {
    // Bounds that keep every coordinate of the iterators, and the products below, well inside 32 and 64 bits.
    for (int64_t v : {p.in_size[axis], output_size(p, axis), p.padding[axis], p.dilation[axis]}) {
      if (v > kMaxExtent) return no("a size, padding or dilation", v, "at most 2^20");
    }
    int64_t const taps = most_taps(p, axis);
    if (taps > kMaxTapsPerDim) return no("taps of a residue class along one dimension", taps, "at most 10");
    class_taps *= taps;
  }
  int64_t const filter_elements = k_channels * c_channels * tap_count(p);
  if (filter_elements > kMaxInt) return no("the padded weight's element count", filter_elements, "less than 2^31");
  // The filter iterator forms the offset of its first row within a tile in 32 bits, and in bits.
  int64_t const row_bits = class_taps * c_channels * bytes * 8;
  if (row_bits > kMaxInt / kMaxTileK) {
    return no("taps of a residue class times output channels", class_taps * c_channels, "at most 2^31 bits in 32 rows");
  }
  XStrides const strides = x_strides(p);
  int64_t const step = largest_step(p, strides);
  if (step > kMaxInt) return no("a distance within one sample of x", step, "less than 2^31 elements");
  if (samples_per_launch(p, strides.v[0]) < 1) {
    return no("the number of voxels of one sample's output", output_size(p, 0) * output_size(p, 1) * output_size(p, 2),
              "less than 2^31 in each residue class");
  }
  if (prepare_blocks_bound(p) > kMaxInt) return no("blocks of the pre-pass", prepare_blocks_bound(p), "less than 2^31");
  return CONVT3D_OK;
}

// Of the joint kernel's partial sums in the workspace.
int64_t partial_sums_offset(Problem const& p) { return round_up(operand_layout(p).total_bytes, kWorkspaceAlignment); }

size_t workspace_bytes(Problem const& p, convt3d_device const& device) {
  if (p.groups != 1 || element_count(y_shape(p)) == 0) return 0;
  if (select_patch_kernel(p, device) != nullptr) return size_t(patch::workspace_bytes(p, device.compute_capability));
  size_t const usual = run_if_workspace_bytes(p);
  if (columns::select(p, device) == nullptr) return usual;
  return std::max(usual, size_t(columns::workspace_bytes(p)));
}

// Whether the code in here that a device of compute capability 9.0 runs was compiled for it. Code for SM80 has no
// instruction to wait for the kernel before, and a launch that may start early would race with it.
constexpr bool waits_on_sm90() {
  for (int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture == 900) return true;
  }
  return false;
}

// Whether the kernel may start while the pre-pass still runs. Newer devices run the code of SM80. Where the device
// cannot be asked, the launch will tell.
bool starts_early() {
  int device = 0, major = 0;
  return waits_on_sm90() && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

Status fail(cudaError_t error, Message& message) {
  cudaGetLastError();  // reported here; the next call must not find it
  return message.fail(CONVT3D_CUDA_ERROR, "sm80: %s", cudaGetErrorString(error));
}

Status enqueue(Problem const& p, convt3d_tensors const& tensors, int32_t const* condition, int multiprocessors,
               cudaStream_t stream, Message& message) {
  prepare::Params pre_pass = prepare_params(p, tensors);
  pre_pass.condition = condition;
  joint::JointLaunchFn const joint_kernel = select_joint_kernel(p);
  bool const weight_in_place = joint_kernel != nullptr && joint::reads_weight_in_place(p) &&
                               reinterpret_cast<uintptr_t>(tensors.weight) % kAccessBytes == 0;
  if (weight_in_place) pre_pass.filter_size = 0;
  cudaError_t error = prepare::launch(pre_pass, element_bytes(p), uses_tf32(p), stream,
                                      condition != nullptr ? 8 * multiprocessors : INT32_MAX);
  Call call = make_call(p, tensors, pre_pass);
  call.condition = condition;
  call.overlap = starts_early();
  call.multiprocessors = multiprocessors;
  if (error == cudaSuccess && joint_kernel != nullptr) {
    joint::JointCall joint_call{call, tensors.weight, weight_in_place, false, nullptr};
    joint_call.pre_pass = !weight_in_place || pre_pass.x_out != nullptr;
    joint_call.partial_sums = static_cast<char*>(tensors.workspace) + partial_sums_offset(p);
    error = joint_kernel(joint_call, stream);
  } else if (error == cudaSuccess) {
    error = select_kernel(p)(call, stream);
  }
  return error == cudaSuccess ? CONVT3D_OK : fail(error, message);
}

Status run(Problem const& p, convt3d_plan const&, convt3d_tensors const& tensors, void* stream_handle,
           Message& message) {
  if (p.groups != 1) return grouped::run(p, tensors, stream_handle, message);
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  convt3d_device device{};
  Status const status = current_device(&device, message);
  if (status != CONVT3D_OK) return status;
  patch::PatchLaunchFn const patch_kernel = select_patch_kernel(p, device);
  columns::ColumnsLaunchFn const columns_kernel = patch_kernel == nullptr ? columns::select(p, device) : nullptr;
  // The weight's alignment is not known before. The usual kernels take any.
  bool const by_columns = columns_kernel != nullptr && reinterpret_cast<uintptr_t>(tensors.weight) % kAccessBytes == 0;
  if (patch_kernel == nullptr && !by_columns) return enqueue(p, tensors, nullptr, 0, stream, message);
  cudaError_t const error = by_columns ? columns_kernel({&p, &tensors, starts_early()}, stream)
                                       : patch_kernel({&p, &tensors, device, starts_early()}, stream);
  return error == cudaSuccess ? CONVT3D_OK : fail(error, message);
}

// PyTorch's own convolution, with the rest in place behind it, takes 0.7 of the time for depthwise sums of fp32 along
// rows (docs/performance-log.md), where the GPU's time is longer than the host's.
bool worthwhile(Problem const& p, convt3d_device const& device) {
  if (p.groups == 1) return !pytorch_is_faster(p, device.multiprocessors);
  bool const depthwise = p.groups == p.in_channels;
  return !depthwise || !has_unit_strides(p) || p.dtype != CONVT3D_F32 || grouped::lanes_are_channels(p) ||
         element_count(y_shape(p)) < (int64_t{1} << 21);
}

constexpr Family kFamily{CONVT3D_KERNEL_SM80, supported, workspace_bytes, run, worthwhile};

}  // namespace

// Where two outputs along W are one access, so that their number is even. Measured on an H200
// (docs/performance-log-sm80.md): with sums in shared memory too, such thread blocks are two to a multiprocessor and
// lose as much as they gain.
bool pairs_classes(Problem const& p, bool stash) {
  int const bytes = element_bytes(p);
  Size5 const y_sizes = y_shape(p), add_stride = effective_add_stride(p);
  auto const one_access = [&](int64_t const* stride, int alignment) {
    return stride[4] == 1 && access_bytes(y_sizes, stride, 4, alignment, bytes) >= 2 * bytes;
  };
  return !stash && p.stride[2] == 2 && output_size(p, 2) % 2 == 0 && one_access(p.y_stride, p.y_alignment) &&
         (!p.has_add || one_access(add_stride.v, p.add_alignment));
}

size_t run_if_workspace_bytes(Problem const& p) {
  if (element_count(y_shape(p)) == 0) return 0;
  int64_t const partial = select_joint_kernel(p) != nullptr ? joint::partial_bytes(p) : 0;
  return size_t(partial > 0 ? partial_sums_offset(p) + partial : operand_layout(p).total_bytes);
}

Status run_if(Problem const& p, convt3d_tensors const& tensors, int32_t const* condition, int multiprocessors,
              cudaStream_t stream, Message& message) {
  return enqueue(p, tensors, condition, multiprocessors, stream, message);
}

}  // namespace convt3d::sm80

convt3d::Family const* convt3d::sm80_family() { return &convt3d::sm80::kFamily; }
