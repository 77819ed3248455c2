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
  if (p.dtype == CONVT3D_F16) return narrow ? f16_n32(channels_last) : f16_n64(channels_last);
  if (p.dtype == CONVT3D_BF16) return narrow ? bf16_n32(channels_last) : bf16_n64(channels_last);
  if (uses_tf32(p)) return narrow ? tf32_n32(channels_last) : tf32_n64(channels_last);
  return narrow ? ieee_n32(channels_last) : ieee_n64(channels_last);
}

}  // namespace convt3d::sm80
