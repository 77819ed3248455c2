// SPDX-License-Identifier: Apache-2.0
//
// Where the two parts of fp32 operands lie in ieee mode: 64 bytes of hi, then 64 of lo, for 32 channels, in a row of a
// weight piece as in a voxel of the copy of x.
#pragma once

#include "sm90/split.hpp"
#include "sm90/stream/geometry.hpp"

namespace convt3d::sm90::stream {

/// Where channels 4 `group` and on begin among the hi parts; kLowPart further they begin among the lo parts.
CONVT3D_HOST_DEVICE constexpr int parts_offset(int group) { return group * 8; }

}  // namespace convt3d::sm90::stream
