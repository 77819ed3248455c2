// SPDX-License-Identifier: Apache-2.0
//
// The pre-kernel of fp32 in ieee mode. Some CTAs write the weight images in two parts, the others look at a sample of x
// for what fixes the scale of the main kernel and whether that computes the problem (split.hpp).
#pragma once

#include "cutlass/fast_math.h"
#include "sm90/weights.hpp"

namespace convt3d::sm90 {

constexpr int kSplitPrepareThreads = 512;
constexpr int kScanBatch = 4;  // accesses of a thread in flight

/// x as nested runs of memory, the innermost dense; dimensions that nest without a gap are one.
struct ScanParams {
  float const* x;
  int64_t accesses;  // of 16 bytes (`vectorized`) or one value; 32 neighbours are a region
  int64_t groups;    // of `step` regions, one of which is looked at
  int32_t step;
  int32_t vectorized;
  int32_t dims;                    // beside the innermost
  cutlass::FastDivmodU64 size[4];  // accesses of the innermost, then sizes of all but the outermost
  int64_t stride[4];               // elements
};

struct SplitPrepareParams {
  WeightParams weights;
  SplitParams split;
  ScanParams scan;
};

ScanParams scan_params(Problem const& p, void const* x);

/// Enqueues the pre-kernel. The main kernel may be launched as its programmatic dependent.
cudaError_t prepare_split(SplitPrepareParams const& params, cudaStream_t stream);

}  // namespace convt3d::sm90
