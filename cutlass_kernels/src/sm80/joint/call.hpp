// SPDX-License-Identifier: Apache-2.0
//
// The host's view of one run of the joint kernel, beside what all kernels of the family are told.
#pragma once

#include "sm80/call.hpp"

namespace convt3d::sm80::joint {

struct JointCall {
  Call base;
  void const* weight;  // as the caller holds them, whether they are read there and not in base.filter
  bool weight_in_place;
  bool pre_pass;       // comes before the kernel
  void* partial_sums;  // room for partial_bytes()
};

/// One compiled kernel.
using JointLaunchFn = cudaError_t (*)(JointCall const& call, cudaStream_t stream);

}  // namespace convt3d::sm80::joint
