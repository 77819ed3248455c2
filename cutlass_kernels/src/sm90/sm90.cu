// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family: Hopper's warp-specialised kernel. kernel.hpp has its shape, support.hpp what it takes.
#include <cuda_runtime.h>

#include "family.hpp"
#include "sm90/launch.hpp"
#include "sm90/support.hpp"

namespace convt3d {
namespace {

size_t workspace_bytes(Problem const& p, convt3d_device const&) {
  return element_count(y_shape(p)) == 0 ? 0 : sm90::workspace_layout(p, sm90::choose_config(p)).bytes;
}

Status fail(char const* what, cudaError_t error, Message& message) {
  return message.fail(CONVT3D_CUDA_ERROR, "sm90: %s: %s", what, cudaGetErrorString(error));
}

sm90::Launch* instance(Problem const& p) {
  bool const last = sm90::form(p).channels_last;
  if (p.dtype == CONVT3D_F16) return last ? sm90::launch_ndhwc_f16 : sm90::launch_ncdhw_f16;
  if (p.dtype == CONVT3D_BF16) return last ? sm90::launch_ndhwc_bf16 : sm90::launch_ncdhw_bf16;
  return last ? sm90::launch_ndhwc_tf32 : sm90::launch_ncdhw_tf32;
}

Status run(Problem const& p, convt3d_plan const&, convt3d_tensors const& t, void* stream_handle, Message& message) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return fail("cannot ask the device", error, message);

  sm90::Config const config = sm90::choose_config(p);
  sm90::KernelParams kernel_params{};
  sm90::WeightParams weight_params{};
  if (!sm90::fill_params(kernel_params, weight_params, p, config, t)) {
    return message.fail(CONVT3D_CUDA_ERROR, "sm90: the driver refuses a tensor map");
  }
  int64_t const runs = static_cast<int64_t>(kernel_params.scheduler.runs) * kernel_params.scheduler.classes;
  int const ctas = static_cast<int>(runs < multiprocessors ? runs : multiprocessors);
  error = sm90::prepare_weights(weight_params, static_cast<convt3d_dtype>(p.dtype), stream);
  if (error != cudaSuccess) return fail("cannot launch the weight kernel", error, message);
  error = instance(p)(kernel_params, sm90::shared_bytes(p, config.stages, config.ring), ctas, stream);
  if (error != cudaSuccess) return fail("cannot launch the kernel", error, message);
  return CONVT3D_OK;
}

}  // namespace

Family const* sm90_family() {
  static constexpr Family family{CONVT3D_KERNEL_SM90, sm90::supported, workspace_bytes, run};
  return &family;
}

}  // namespace convt3d
