// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family: Hopper's warp-specialised kernel. kernel.hpp has its shape, support.hpp what it takes.
#include <cuda_runtime.h>

#include "family.hpp"
#include "sm80/conditional.hpp"
#include "sm90/launch.hpp"
#include "sm90/most_ctas.hpp"
#include "sm90/product/product.hpp"
#include "sm90/stream/params.hpp"
#include "sm90/support.hpp"

namespace convt3d {
namespace {

bool streams(Problem const& p, int multiprocessors) {
  return sm90::choose_mainloop(p, multiprocessors) == sm90::Mainloop::kStream;
}

/// In ieee mode the sm80 family computes what this one's arithmetic does not hold, so it must take the problem too.
Status supported(Problem const& p, convt3d_device const& device, Message& message) {
  Status const status = sm90::supported(p, device, message);
  return status == CONVT3D_OK && sm90::uses_split(p) ? sm80_family()->supported(p, device, message) : status;
}

size_t own_workspace_bytes(Problem const& p, int multiprocessors) {
  if (sm90::chooses_product(p, multiprocessors)) return sm90::product::workspace_bytes(p);
  return streams(p, multiprocessors) ? sm90::stream::workspace_layout(p).bytes
                                     : sm90::workspace_layout(p, sm90::choose_config(p)).bytes;
}

size_t sm80_workspace_offset(Problem const& p, int multiprocessors) {
  return (own_workspace_bytes(p, multiprocessors) + 255) / 256 * 256;
}

size_t workspace_bytes(Problem const& p, convt3d_device const& device) {
  if (element_count(y_shape(p)) == 0) return 0;
  int const multiprocessors = device.multiprocessors;
  if (!sm90::uses_split(p)) return own_workspace_bytes(p, multiprocessors);
  return sm80_workspace_offset(p, multiprocessors) + sm80::run_if_workspace_bytes(p);
}

Status fail(char const* what, cudaError_t error, Message& message) {
  cudaGetLastError();  // reported here; the next call must not find it
  return message.fail(CONVT3D_CUDA_ERROR, "sm90: %s: %s", what, cudaGetErrorString(error));
}

sm90::stream::Launch* stream_instance(Problem const& p) {
  bool const last = sm90::form(p).channels_last;
  if (p.dtype == CONVT3D_F16) return last ? sm90::stream::launch_ndhwc_f16 : sm90::stream::launch_ncdhw_f16;
  if (p.dtype == CONVT3D_BF16) return last ? sm90::stream::launch_ndhwc_bf16 : sm90::stream::launch_ncdhw_bf16;
  if (sm90::uses_split(p)) return last ? sm90::stream::launch_ndhwc_ieee : sm90::stream::launch_ncdhw_ieee;
  return last ? sm90::stream::launch_ndhwc_tf32 : sm90::stream::launch_ncdhw_tf32;
}

/// In ieee mode, `declined` is where the sm80 family learns whether it is its turn.
cudaError_t run_stream(Problem const& p, convt3d_tensors const& t, int multiprocessors, cudaStream_t stream,
                       int32_t const*& declined) {
  namespace kernel = sm90::stream;
  kernel::Config const config = kernel::choose_config(p);
  kernel::StreamParams kernel_params{};
  kernel::PieceParams piece_params{};
  prepare::Params x_params{};
  if (!kernel::fill_params(kernel_params, piece_params, x_params, p, config, t, multiprocessors)) {
    return cudaErrorInvalidValue;
  }
  int const items = kernel_params.scheduler.runs;
  cudaError_t error = cudaSuccess;
  if (x_params.x_out != nullptr) error = prepare::launch(x_params, element_bytes(p), uses_tf32(p), stream);
  if (error != cudaSuccess) return error;
  // A plain launch: the kernel behind it waits for this launch, and so for the copy of x before it.
  bool const split = sm90::uses_split(p);
  error = split ? kernel::prepare_split_pieces(piece_params, stream)
                : kernel::prepare_pieces(piece_params, static_cast<convt3d_dtype>(p.dtype), stream);
  if (error != cudaSuccess) return error;
  if (split) declined = &kernel_params.split.state->declined;
  return stream_instance(p)(kernel_params, kernel::shared_bytes(p, config), sm90::cta_count(items, multiprocessors),
                            stream);
}

sm90::Launch* instance(Problem const& p) {
  bool const last = sm90::form(p).channels_last;
  if (p.dtype == CONVT3D_F16) return last ? sm90::launch_ndhwc_f16 : sm90::launch_ncdhw_f16;
  if (p.dtype == CONVT3D_BF16) return last ? sm90::launch_ndhwc_bf16 : sm90::launch_ncdhw_bf16;
  if (sm90::uses_split(p)) return last ? sm90::launch_ndhwc_ieee : sm90::launch_ncdhw_ieee;
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

  auto run_sm80_if = [&](int32_t const* declined) {
    convt3d_tensors rest = t;
    rest.workspace = static_cast<unsigned char*>(t.workspace) + sm80_workspace_offset(p, multiprocessors);
    return sm80::run_if(p, rest, declined, multiprocessors, stream, message);
  };
  if (sm90::chooses_product(p, multiprocessors)) {
    error = sm90::product::launch(p, t, multiprocessors, stream);
    return error == cudaSuccess ? CONVT3D_OK : fail("cannot launch the product kernel", error, message);
  }
  bool const split = sm90::uses_split(p);
  if (streams(p, multiprocessors)) {
    int32_t const* declined = nullptr;
    error = run_stream(p, t, multiprocessors, stream, declined);
    if (error != cudaSuccess) return fail("cannot launch the streaming kernel", error, message);
    return split ? run_sm80_if(declined) : CONVT3D_OK;
  }
  sm90::Config const config = sm90::choose_config(p);
  sm90::KernelParams kernel_params{};
  sm90::WeightParams weight_params{};
  if (!sm90::fill_params(kernel_params, weight_params, p, config, t)) {
    return message.fail(CONVT3D_CUDA_ERROR, "sm90: the driver refuses a tensor map");
  }
  int64_t const runs = static_cast<int64_t>(kernel_params.scheduler.runs) * kernel_params.scheduler.classes;
  int const ctas = sm90::cta_count(runs, multiprocessors, kernel_params.scheduler.classes);
  if (split) {
    sm90::ScanParams scan;
    sm90::fill_split_params(kernel_params, scan, p, config, t);
    error = sm90::prepare_split({weight_params, kernel_params.split, scan}, stream);
  } else {
    error = sm90::prepare_weights(weight_params, static_cast<convt3d_dtype>(p.dtype), stream);
  }
  if (error != cudaSuccess) return fail("cannot launch the pre-kernel", error, message);
  error = instance(p)(kernel_params, sm90::shared_bytes(p, config.stages, config.ring), ctas, stream);
  if (error != cudaSuccess) return fail("cannot launch the kernel", error, message);
  return split ? run_sm80_if(kernel_params.split.declined) : CONVT3D_OK;
}

}  // namespace

Family const* sm90_family() {
  static constexpr Family family{CONVT3D_KERNEL_SM90, supported, workspace_bytes, run, sm90::worthwhile};
  return &family;
}

}  // namespace convt3d
