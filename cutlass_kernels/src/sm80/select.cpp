// SPDX-License-Identifier: Apache-2.0
#include "sm80/select.hpp"

#include "sm80/columns/instances.hpp"
#include "sm80/estimate.hpp"
#include "sm80/instances/instances.hpp"
#include "sm80/joint/geometry.hpp"
#include "sm80/joint/instances.hpp"
#include "sm80/patch/choice.hpp"
#include "sm80/shared_memory.hpp"
#include "sm80/sums.hpp"

namespace convt3d::sm80 {

joint::JointLaunchFn select_joint_kernel(Problem const& p) {
  if (!joint::chosen(p)) return nullptr;
  return p.dtype == CONVT3D_F16 ? joint::launch_f16 : p.dtype == CONVT3D_BF16 ? joint::launch_bf16 : joint::launch_tf32;
}

patch::PatchLaunchFn select_patch_kernel(Problem const& p, convt3d_device const& device) {
  if (!patch::chosen(p, device.compute_capability)) return nullptr;
  int const unit = patch::unit_elements(p);
  if (p.dtype == CONVT3D_F16) return unit == 2 ? patch::f16_u2 : unit == 4 ? patch::f16_u4 : patch::f16_u8;
  if (p.dtype == CONVT3D_BF16) return unit == 2 ? patch::bf16_u2 : unit == 4 ? patch::bf16_u4 : patch::bf16_u8;
  if (uses_tf32(p)) return unit == 2 ? patch::tf32_u2 : patch::tf32_u4;
  return unit == 2 ? patch::ieee_u2 : patch::ieee_u4;
}

columns::ColumnsLaunchFn columns::select(Problem const& p, convt3d_device const& device) {
  if (!chooses_columns(p, device.multiprocessors)) return nullptr;
  if (p.dtype == CONVT3D_F16) return launch_f16;
  if (p.dtype == CONVT3D_BF16) return launch_bf16;
  return uses_tf32(p) ? launch_tf32 : launch_ieee;
}

namespace {

// In ieee mode every sixteen products are added up with a rounding; so many come to half of the bound.
constexpr int64_t kLongSumOfSums = 1024;

// Thread blocks of a tile that keeps sums in shared memory, as many as its registers let run at once.
bool has_room(int blocks, int kilobytes) {
  return shared_memory().of_multiprocessor >= blocks * (kilobytes * 1024 + kReservedBytes);
}

// Whether tiles of 128 channels are enough to fill a device.
bool fills_device(Problem const& p) {
  constexpr int64_t kWanted = 264;
  int64_t tiles = residue_class_count(p.stride) * ((p.out_channels + 127) / 128);
  int64_t rows = p.batch;
  for (int axis = 0; axis < 3; ++axis) rows *= output_size(p, axis) / p.stride[axis];
  return tiles * ((rows + 127) / 128) >= kWanted;
}

// Whether tiles of 96 channels cover the channels with less to spare than tiles of 128, and no more than tiles of 64.
bool fits_96(Problem const& p) {
  int64_t const covered = round_up(p.out_channels, 96);
  return covered < round_up(p.out_channels, 128) && covered <= round_up(p.out_channels, 64);
}

LaunchFn select_half(Problem const& p, bool channels_last, bool is_long, bool narrow, bool wide) {
  bool const f16 = p.dtype == CONVT3D_F16;
  if (narrow) {
    if (channels_last && !is_long) return f16 ? f16_n32() : bf16_n32();
    return f16 ? f16_n32_long(channels_last) : bf16_n32_long(channels_last);
  }
  if (wide && channels_last && !is_long) return f16 ? f16_n128() : bf16_n128();
  if (is_long && fits_96(p) && (wide || fills_device(p)) && has_room(2, 76)) {
    return f16 ? f16_n96_long(channels_last) : bf16_n96_long(channels_last);
  }
  if (is_long && wide && has_room(2, 108)) {
    return f16 ? f16_n128_long(channels_last) : bf16_n128_long(channels_last);
  }
  if (channels_last && !is_long) return f16 ? f16_n64() : bf16_n64();
  return f16 ? f16_n64_long(channels_last) : bf16_n64_long(channels_last);
}

LaunchFn select_tf32(Problem const& p, bool channels_last, bool is_long, bool narrow, bool wide) {
  if (narrow) return channels_last && !is_long ? tf32_n32() : tf32_n32_long(channels_last);
  bool const helps = is_long || (channels_last && longest_sum(p) == kSumProducts);
  if (helps && fits_96(p) && has_room(2, 76) && fills_device(p)) return tf32_n96_long(channels_last);
  if (wide && helps && has_room(2, 108) && fills_device(p)) return tf32_n128_long(channels_last);
  if (is_long && !has_room(3, 73)) return tf32_n64_long_small(channels_last);
  return channels_last && !is_long ? tf32_n64() : tf32_n64_long(channels_last);
}

}  // namespace

LaunchFn select_kernel(Problem const& p) {
  // Lanes run along channels where these are neighbours, along voxels elsewhere. One channel alone has no run.
  bool const channels_last = p.y_stride[1] == 1 && p.out_channels > 1;
  // A 64-wide tile wastes half its products on up to 32 channels.
  bool const narrow = p.out_channels <= 32;
  // Half the reads of x and of the filter, where as many tiles of 64 would do no less work. Measured on an H200
  // (docs/performance-log-sm80.md).
  bool const wide = (p.out_channels - 1) / 64 % 2 == 1;
  if (uses_ieee(p)) {
    if (longest_sum(p) > kLongSumOfSums) return narrow ? ieee_n32_long(channels_last) : ieee_n64_long(channels_last);
    return narrow ? ieee_n32(channels_last) : ieee_n64(channels_last);
  }
  bool const is_long = longest_sum(p) > kSumProducts;
  return uses_tf32(p) ? select_tf32(p, channels_last, is_long, narrow, wide)
                      : select_half(p, channels_last, is_long, narrow, wide);
}

}  // namespace convt3d::sm80
