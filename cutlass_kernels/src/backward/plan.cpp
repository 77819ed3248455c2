// SPDX-License-Identifier: Apache-2.0
#include "backward/plan.hpp"

#include <algorithm>

namespace convt3d::backward {
namespace {

// Blocks that end soon keep what the GPU reads at any time close together in memory: measured on an H200, twice or
// four times as much per block costs 1 to 3 %, and less adds partial sums.
constexpr int64_t kRowSteps = 8;         // accesses of a lane per segment: 4 KiB of each tensor per warp
constexpr int64_t kLeastVoxelSteps = 4;  // voxels of a thread per block
constexpr int64_t kMostVoxelSteps = 16;
constexpr int64_t kWantedVoxelBlocks = 4096;  // enough to fill any GPU several times over
constexpr int64_t kTileSteps = 8;             // tiles of a block, one after the other

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Spacing of the elements when the dimensions `axes` (outermost first) are walked as one, or -1.
template <size_t kCount>
int64_t spacing(Size5 const& shape, int64_t const* stride, int const (&axes)[kCount]) {
  int64_t extent = 1, step = -1;
  for (size_t i = kCount; i-- > 0;) {
    int const axis = axes[i];
    if (shape[axis] == 1) continue;
    if (step < 0) step = stride[axis];
    if (stride[axis] != step * extent) return -1;
    extent *= shape[axis];
  }
  return step < 0 ? 0 : step;  // one element: any spacing will do
}

Operand operand(Size5 const& shape, int64_t const* stride) {
  Size5 const effective = effective_stride(shape, stride);
  Operand result{};
  std::copy(effective.v, effective.v + 5, result.stride);
  result.flat = spacing(shape, stride, {2, 3, 4});
  result.voxels = spacing(shape, stride, {0, 2, 3, 4});
  if (shape[2] * shape[3] * shape[4] == 1) result.flat = 1;
  return result;
}

/// Whether runs of positions can be accessed 16 bytes at a time beside those of `lead`, from which each row starts a
/// whole number of accesses plus the same few elements away.
bool wide_rows(Operand const& o, int alignment, Operand const& lead, int vector) {
  if (alignment < kAccessBytes || o.flat != 1) return false;
  return (o.stride[0] - lead.stride[0]) % vector == 0 && (o.stride[1] - lead.stride[1]) % vector == 0;
}

Size5 shape_of(Description const& d) {
  Size5 shape;
  std::copy(d.size, d.size + 5, shape.v);
  return shape;
}

}  // namespace

bool turnable(Description const& d) {
  Size5 const shape = shape_of(d);
  int const vector = kAccessBytes / (d.dtype == CONVT3D_F32 ? 4 : 2);
  auto const aligned_rows = [&](int64_t const* stride, int alignment) {
    Operand const o = operand(shape, stride);
    return alignment == kAccessBytes && o.flat == 1 && o.stride[0] % vector == 0 && o.stride[1] % vector == 0;
  };
  int64_t const positions = shape[2] * shape[3] * shape[4];
  if (positions % vector != 0 || shape[1] % vector != 0) return false;
  if (operand(shape, d.grad_output_stride).flat != 0 && !aligned_rows(d.grad_output_stride, d.grad_output_alignment)) {
    return false;
  }
  if (d.activation != CONVT3D_ACT_NONE && !aligned_rows(d.t_stride, d.t_alignment)) return false;
  return !d.has_grad_pre || aligned_rows(d.grad_pre_stride, d.grad_pre_alignment);
}

Plan make_plan(Description const& d) {
  Size5 const shape = shape_of(d);
  int const element = d.dtype == CONVT3D_F32 ? 4 : 2;
  bool const has_t = d.activation != CONVT3D_ACT_NONE;

  Plan plan{};
  Params& p = plan.params;
  p.grad_output = operand(shape, d.grad_output_stride);
  // The strides of what is not there mean nothing.
  if (has_t) p.t = operand(shape, d.t_stride);
  if (d.has_grad_pre) p.grad_pre = operand(shape, d.grad_pre_stride);
  p.batch = shape[0];
  p.channels = shape[1];
  p.positions = shape[2] * shape[3] * shape[4];
  p.height = shape[3];
  p.width = shape[4];
  p.activation = d.activation;
  p.negative_slope = d.negative_slope;

  Operand const& lead = d.has_grad_pre ? p.grad_pre : has_t ? p.t : p.grad_output;
  plan.walk = d.has_grad_pre_ndhwc                    ? Walk::kTurned
              : p.channels > 1 && lead.stride[1] == 1 ? Walk::kColumns
                                                      : Walk::kRows;
  int const wide = kAccessBytes / element;
  auto const can_be_wide = [&](Operand const& o, int64_t const* stride, int alignment) {
    if (plan.walk != Walk::kColumns) return wide_rows(o, alignment, lead, wide);
    return o.voxels >= 0 && access_bytes(shape, stride, 1, alignment, element) == kAccessBytes;
  };
  // One value for a whole row, or for all channels of a voxel, as a summed loss gives, is as good as neighbours.
  bool const constant =
      plan.walk == Walk::kRows ? p.grad_output.flat == 0 : p.grad_output.stride[1] == 0 && p.grad_output.voxels >= 0;
  bool all_wide = constant || can_be_wide(p.grad_output, d.grad_output_stride, d.grad_output_alignment);
  if (has_t) all_wide = all_wide && can_be_wide(p.t, d.t_stride, d.t_alignment);
  if (d.has_grad_pre) all_wide = all_wide && can_be_wide(p.grad_pre, d.grad_pre_stride, d.grad_pre_alignment);
  plan.vector = all_wide ? wide : 1;

  if (plan.walk == Walk::kRows) {
    // A row may begin in the middle of an access, and then has one more.
    int64_t const accesses = divide_up(p.positions + plan.vector - 1, plan.vector);
    p.steps = std::min(kRowSteps, divide_up(accesses, kWarp));
    p.rows_split = divide_up(accesses, p.steps * kWarp);
    p.partials = p.batch * p.rows_split;
  } else if (plan.walk == Walk::kTurned) {
    p.steps = std::min(kTileSteps, divide_up(p.positions, kTilePositions));
    p.rows_split = divide_up(p.positions, p.steps * kTilePositions);
    p.partials = p.batch * p.rows_split;
  } else {
    int64_t const voxels = p.batch * p.positions;
    int64_t const at_once = voxels_per_step(p.channels, plan.vector);
    p.steps = std::clamp(divide_up(voxels, at_once * kWantedVoxelBlocks), kLeastVoxelSteps, kMostVoxelSteps);
    p.partials = divide_up(voxels, at_once * p.steps);
  }
  plan.workspace_bytes = d.has_grad_bias ? static_cast<size_t>(p.channels * p.partials) * sizeof(float) : 0;
  return plan;
}

}  // namespace convt3d::backward
