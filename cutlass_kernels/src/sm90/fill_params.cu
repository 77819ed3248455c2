// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>

#include "sm90/launch.hpp"

namespace convt3d::sm90 {
namespace {

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                    cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// The driver's encoder of tensor maps, or null. A failure is not remembered: it may be an earlier error of the
/// context.
EncodeFunction encoder() {
  static std::atomic<EncodeFunction> cached{nullptr};
  if (EncodeFunction const known = cached.load(std::memory_order_acquire)) return known;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  cached.store(reinterpret_cast<EncodeFunction>(found), std::memory_order_release);
  return reinterpret_cast<EncodeFunction>(found);
}

/// Whether one map over (W, H / 4, N C, D, H mod 4) describes the tensor.
constexpr bool can_merge(Problem const& p, int64_t const* stride) {
  return output_size(p, 1) % 4 == 0 && (p.batch == 1 || stride[0] == p.out_channels * stride[1]);
}

/// Maps of a W-contiguous tensor with the shape of y whose boxes are ring units: one (merged), or one for each
/// residue of the row modulo 4.
bool encode_units(CUtensorMap* maps, Problem const& p, void const* base, int64_t const* stride, bool merged) {
  Size5 const shape = y_shape(p);
  auto size = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  // The stride of a dimension of size 1 is never used, but must be valid.
  auto bytes = [&](int64_t factor, int axis) {
    return static_cast<cuuint64_t>(shape[axis] == 1 ? 16 : factor * stride[axis] * 4);
  };
  cuuint32_t const step[5] = {1, 1, 1, 1, 1};
  EncodeFunction const encode = encoder();
  if (encode == nullptr) return false;
  for (int m = 0; m < (merged ? 1 : 4); ++m) {
    int64_t const rows = merged ? shape[3] / 4 : (shape[3] - m + 3) / 4;
    cuuint64_t const dims[5] = {size(shape[4]), size(rows), size(merged ? shape[0] * shape[1] : shape[1]),
                                size(shape[2]), size(merged ? 4 : shape[0])};
    cuuint64_t const strides[4] = {bytes(4, 3), bytes(1, 1), bytes(1, 2), merged ? bytes(1, 3) : bytes(1, 0)};
    cuuint32_t const box[5] = {2 * kTileW, kTileH / 2, kUnitChannels, 1, merged ? 4u : 1u};
    float const* first = static_cast<float const*>(base) + m * stride[3];
    if (encode(&maps[m], CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<float*>(first), dims, strides, box, step,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool fill_params(KernelParams& k, WeightParams& w, Problem const& p, Config const& c, convt3d_tensors const& t) {
  Slab const s = slab(p);
  Tiling const tiles = tiling(p, c.run_length);
  Size3 const out = output_size(p);
  int const blocks = class_blocks(p);
  Workspace const layout = workspace_layout(p, c);
  auto* workspace = static_cast<unsigned char*>(t.workspace);

  MainloopParams& m = k.mainloop;
  m.x = static_cast<float const*>(t.x);
  int64_t const xs[4] = {p.x_stride[0], p.x_stride[1], p.x_stride[2], p.x_stride[3]};
  m.vectorized = p.in_size[2] % 4 == 0 && p.x_alignment == 16;
  for (int i = 0; i < 4; ++i) {
    m.x_stride[i] = xs[i];
    m.vectorized = m.vectorized && (xs[i] % 4 == 0 || x_shape(p)[i] == 1);
  }
  m.in_quads = static_cast<int>(p.in_channels / 4);
  m.channel_blocks = ceil_div(p.in_channels, 32);
  for (int axis = 0; axis < 3; ++axis) {
    Window const win = window(p.kernel[axis], p.padding[axis]);
    m.in_size[axis] = static_cast<int>(p.in_size[axis]);
    m.window_lo[axis] = w.window_lo[axis] = win.lo;
    w.kernel[axis] = k.cold.kernel[axis] = static_cast<int>(p.kernel[axis]);
    w.padding[axis] = k.cold.padding[axis] = static_cast<int>(p.padding[axis]);
    k.cold.out_size[axis] = static_cast<int>(out[axis]);
  }
  m.slab_pitch = s.pitch;
  m.slab_columns = s.columns;
  m.slab_bytes = s.bytes;
  // W quads that hold needed columns. With one W tile those outside the tensor are never written: zeroed once.
  m.quad_lo = m.window_lo[2] < 0 ? -ceil_div(-m.window_lo[2], 4) : m.window_lo[2] / 4;
  int quad_end = ceil_div(kTileW + m.window_lo[2] + window(p.kernel[2], p.padding[2]).count - 1, 4);
  if (tiles.tiles_w == 1) {
    m.quad_lo = m.quad_lo < 0 ? 0 : m.quad_lo;
    int const end = ceil_div(p.in_size[2], 4);
    quad_end = quad_end < end ? quad_end : end;
  }
  m.quads = quad_end - m.quad_lo;
  m.stages = c.stages;
  m.b_stride_units = static_cast<uint32_t>(s.pitch * 128 / 16);
  m.divide_quads = cutlass::FastDivmod(m.quads);
  m.divide_pitch = cutlass::FastDivmod(m.slab_pitch);
  m.depth_count = window(p.kernel[0], p.padding[0]).count;
  m.weights = workspace + layout.weights;
  m.weight_blocks = blocks;
  int first = 0;
  for (int group = 0; group < kGroups; ++group) {
    GroupProgram const program = group_program(p, group);
    if (program.count > kMaxBlocks) return false;
    w.program[group] = program;
    DeviceProgram& d = m.program[group];
    d.first_block = first;
    for (int i = 0; i < kMaxWindow; ++i) d.slice_end[i] = program.slice_end[i];
    for (int i = 0; i < program.count; ++i) {
      Block const& b = program.block[i];
      d.b_offset[i] = (b.channel_block * s.bytes + (b.delta[2] * s.pitch + b.delta[1]) * 128) / 16;
    }
    first += program.count;
  }

  EpilogueParams& e = k.epilogue;
  Size5 const add_stride = effective_add_stride(p);
  bool const flat_add = add_stride[2] == 0 && add_stride[3] == 0 && add_stride[4] == 0;
  e.add_mode = !p.has_add ? AddMode::kNone : flat_add ? AddMode::kPerChannel : AddMode::kTile;
  e.y_merged = can_merge(p, p.y_stride);
  if (!encode_units(e.y_map, p, t.y, p.y_stride, e.y_merged)) return false;
  if (e.add_mode == AddMode::kTile) {
    e.add_merged = can_merge(p, p.add_stride);
    if (!encode_units(e.add_map, p, t.add, p.add_stride, e.add_merged)) return false;
  }
  e.add = static_cast<float const*>(t.add);
  e.add_stride[0] = add_stride[0];
  e.add_stride[1] = add_stride[1];
  e.bias = static_cast<float const*>(t.bias);
  e.bias_stride = p.bias_stride;
  e.has_bias = p.has_bias;
  e.activation = p.activation;
  e.add_after = p.add_order == CONVT3D_ADD_AFTER;
  e.negative_slope = p.negative_slope;
  e.ring = c.ring;
  e.out_channels = static_cast<int>(p.out_channels);

  SchedulerParams& sp = k.scheduler;
  sp.counters = reinterpret_cast<int32_t*>(workspace + layout.counters);
  sp.owners = reinterpret_cast<int32_t*>(workspace + layout.owners);
  sp.classes = class_count(p.out_channels);
  sp.runs = static_cast<int>(tiles.runs);
  sp.run_length = c.run_length;
  sp.pairs_d = tiles.pairs[0];
  sp.divide_tiles_h = cutlass::FastDivmod(tiles.tiles_h);
  sp.divide_tiles_w = cutlass::FastDivmod(tiles.tiles_w);
  sp.divide_runs_d = cutlass::FastDivmod(tiles.runs_d);

  ColdParams& cold = k.cold;
  cold.y = static_cast<float*>(t.y);
  cold.add = static_cast<float const*>(t.add);
  cold.weight = static_cast<float const*>(t.weight);
  for (int i = 0; i < 5; ++i) {
    cold.y_stride[i] = p.y_stride[i];
    cold.add_stride[i] = add_stride[i];
    cold.weight_stride[i] = w.weight_stride[i] = p.weight_stride[i];
  }
  cold.has_add = p.has_add;
  cold.in_channels = w.in_channels = static_cast<int>(p.in_channels);
  cold.weight_suspect = reinterpret_cast<int32_t const*>(workspace + layout.suspects);
  cold.weight_suspects = kPrepareCtas;

  w.weight = static_cast<float const*>(t.weight);
  w.out_channels = static_cast<int>(p.out_channels);
  w.classes = sp.classes;
  w.blocks = blocks;
  w.image = workspace + layout.weights;
  w.counters = sp.counters;
  w.owners = sp.owners;
  w.owner_count = static_cast<int64_t>(sp.classes) * sp.runs;
  w.suspect = reinterpret_cast<int32_t*>(workspace + layout.suspects);
  return true;
}

}  // namespace convt3d::sm90
