// SPDX-License-Identifier: Apache-2.0
#include "sm80/select.hpp"

#include "sm80/instances/instances.hpp"
#include "sm80/joint/geometry.hpp"
#include "sm80/joint/instances.hpp"

namespace convt3d::sm80 {

joint::JointLaunchFn select_joint_kernel(Problem const& p) {
  if (!joint::chosen(p)) return nullptr;
  return p.dtype == CONVT3D_F16 ? joint::launch_f16 : p.dtype == CONVT3D_BF16 ? joint::launch_bf16 : joint::launch_tf32;
}

namespace {

// Products of a sum that tensor cores alone may add up: of one sign, twice as many come to the bound of
// docs/numerics.md. In ieee mode, whose every sixteen products are added with a rounding, so many are half of it.
constexpr int64_t kLongSum = 128;
constexpr int64_t kLongSumOfSums = 1024;

// Three thread blocks of the tile that keeps sums in shared memory. Where no device can be asked, the launch will tell.
bool has_room_for_sums() {
  constexpr int kBytes = 3 * 74 * 1024;
  int device = 0, bytes = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess &&
         bytes >= kBytes;
}

}  // namespace

LaunchFn select_kernel(Problem const& p) {
  // Lanes run along channels where these are neighbours, along voxels elsewhere. One channel alone has no run.
  bool const channels_last = p.y_stride[1] == 1 && p.out_channels > 1;
  // A 64-wide tile wastes half its products on up to 32 channels.
  bool const narrow = p.out_channels <= 32;
  // Half the reads of x and of the filter, where as many tiles of 64 would do no less work. Measured on an H200,
  // channels last, fp16: 256 -> 128 channels, k3 from 24^3 0.244 and 0.212 ms, k2 from 32^3 0.265 and 0.253. With the
  // other epilogue it loses as much.
  bool const wide = channels_last && p.dtype != CONVT3D_F32 && (p.out_channels - 1) / 64 % 2 == 1;
  if (wide) return p.dtype == CONVT3D_F16 ? f16_n128() : bf16_n128();
  bool const is_long = longest_sum(p) > kLongSum;
  if (p.dtype != CONVT3D_F32 && narrow && is_long) {
    return p.dtype == CONVT3D_F16 ? f16_n32_long(channels_last) : bf16_n32_long(channels_last);
  }
  if (p.dtype == CONVT3D_F16) return narrow ? f16_n32(channels_last) : f16_n64(channels_last);
  if (p.dtype == CONVT3D_BF16) return narrow ? bf16_n32(channels_last) : bf16_n64(channels_last);
  if (uses_tf32(p) && narrow) return is_long ? tf32_n32_long(channels_last) : tf32_n32(channels_last);
  if (uses_tf32(p) && is_long) {
    return has_room_for_sums() ? tf32_n64_long(channels_last) : tf32_n64_long_small(channels_last);
  }
  if (uses_tf32(p)) return tf32_n64(channels_last);
  if (longest_sum(p) > kLongSumOfSums) return narrow ? ieee_n32_long(channels_last) : ieee_n64_long(channels_last);
  return narrow ? ieee_n32(channels_last) : ieee_n64(channels_last);
}

}  // namespace convt3d::sm80
