// SPDX-License-Identifier: Apache-2.0
//
// Host side: from a problem to the parameters of the two kernels, and one launch function per instance file.
#pragma once

#include <cuda_runtime.h>

#include "sm90/params.hpp"
#include "sm90/split_prepare.hpp"

namespace convt3d::sm90 {

/// The part that brings x in: for slabs `s` with `rows` rows along H.
void fill_x(MainloopParams& m, Problem const& p, convt3d_tensors const& t, Slab const& s, int rows, int tiles_w,
            int stages);

void fill_epilogue(EpilogueParams& e, Problem const& p, convt3d_tensors const& t, int ring);  // all but the maps
void fill_cold(ColdParams& cold, Problem const& p, convt3d_tensors const& t, int32_t const* suspects);

/// Fills both kernels' parameters. False if the driver refuses a tensor map.
bool fill_params(KernelParams& k, WeightParams& w, Problem const& p, Config const& c, convt3d_tensors const& t);

/// The rest of them for fp32 in ieee mode.
void fill_split_params(KernelParams& k, ScanParams& s, Problem const& p, Config const& c, convt3d_tensors const& t);

/// Enqueue the main kernel on `ctas` CTAs, as the programmatic dependent of the pre-kernel.
using Launch = cudaError_t(KernelParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream);
Launch launch_ncdhw_ieee, launch_ncdhw_tf32, launch_ncdhw_f16, launch_ncdhw_bf16;
Launch launch_ndhwc_ieee, launch_ndhwc_tf32, launch_ndhwc_f16, launch_ndhwc_bf16;

}  // namespace convt3d::sm90
