// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "sm90/launch.hpp"
#include "sm90/sums.hpp"
#include "sm90/tensor_map.hpp"

namespace convt3d::sm90 {
namespace {

/// Whether one map describes the whole tensor. NCDHW: over (W, H / 4, N C, D, H mod 4). NDHWC: over
/// (C, W / 2, H, N D, W mod 2).
constexpr bool can_merge(Problem const& p, int64_t const* stride) {
  Size5 const shape = y_shape(p);
  if (form(p).channels_last) return shape[4] % 2 == 0 && (shape[0] == 1 || stride[0] == shape[2] * stride[2]);
  return shape[3] % 4 == 0 && (shape[0] == 1 || stride[0] == shape[1] * stride[1]);
}

/// Maps of a tensor with the shape of y whose boxes are ring units: one (merged), or one for each residue of the row
/// modulo 4 (NCDHW) or of the column modulo 2 (NDHWC).
bool encode_units(CUtensorMap* maps, Problem const& p, void const* base, int64_t const* stride, bool merged) {
  Size5 const shape = y_shape(p);
  Form const f = form(p);
  auto size = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  // The stride of a dimension of size 1 is never used, but must be valid.
  auto bytes = [&](int64_t factor, int axis) {
    return static_cast<cuuint64_t>(shape[axis] == 1 ? 16 : factor * stride[axis] * f.element);
  };
  cuuint32_t const step[5] = {1, 1, 1, 1, 1};
  // The axis that is split, by `ways`, and the one that N merges with.
  int const split = f.channels_last ? 4 : 3;
  int const ways = f.channels_last ? 2 : 4;
  // Where a box's rows are 64 bytes, the other half of the line is wanted soon, by the next class or the next row.
  bool const narrow = f.channels_last || f.element == 2;
  for (int m = 0; m < (merged ? 1 : ways); ++m) {
    auto const parts = size(merged ? shape[split] / ways : (shape[split] - m + ways - 1) / ways);
    auto const last = static_cast<cuuint32_t>(merged ? ways : 1);
    cuuint64_t const last_stride = merged ? bytes(1, split) : bytes(1, 0);
    cuuint64_t const last_size = size(merged ? ways : shape[0]);
    int64_t const n = merged ? shape[0] : 1;
    cuuint64_t const plane = n > 1 ? static_cast<cuuint64_t>(stride[2] * f.element) : bytes(1, 2);  // even of one plane
    cuuint64_t const dims_ncdhw[5] = {size(shape[4]), parts, size(n * shape[1]), size(shape[2]), last_size};
    cuuint64_t const dims_ndhwc[5] = {size(shape[1]), parts, size(shape[3]), size(n * shape[2]), last_size};
    cuuint64_t const strides_ncdhw[4] = {bytes(4, 3), bytes(1, 1), bytes(1, 2), last_stride};
    cuuint64_t const strides_ndhwc[4] = {bytes(2, 4), bytes(1, 3), plane, last_stride};
    cuuint32_t const box_ncdhw[5] = {2 * kTileW, kTileH / 2, static_cast<cuuint32_t>(f.vector()), 1, last};
    cuuint32_t const box_ndhwc[5] = {static_cast<cuuint32_t>(class_channels(f.element)), kTileW, 4, 1, last};
    auto const* first = static_cast<unsigned char const*>(base) + m * stride[split] * f.element;
    if (!encode_tensor_map(&maps[m], kMapTypes[p.dtype], 5, const_cast<unsigned char*>(first),
                           f.channels_last ? dims_ndhwc : dims_ncdhw, f.channels_last ? strides_ndhwc : strides_ncdhw,
                           f.channels_last ? box_ndhwc : box_ncdhw, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                           narrow ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
      return false;
    }
  }
  return true;
}

/// NDHWC with the weights as A: a map over (C, H / 2, W / 2, D, N) for each warp's (H, W) parity.
bool encode_parities(CUtensorMap* maps, Problem const& p, void const* base, int64_t const* stride) {
  Size5 const shape = y_shape(p);
  auto size = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  // The stride of a dimension of size 1 is never used, but must be valid.
  auto bytes = [&](int64_t factor, int axis) { return size(shape[axis] == 1 ? 16 : factor * stride[axis] * 4); };
  cuuint32_t const step[5] = {1, 1, 1, 1, 1};
  cuuint32_t const box[5] = {static_cast<cuuint32_t>(class_channels(4)), kTileH, kTileW, 1, 1};
  for (int m = 0; m < 4; ++m) {
    int const h = warp_parity(m, false);
    int const w = warp_parity(m, true);
    cuuint64_t const dims[5] = {size(shape[1]), size((shape[3] - h + 1) / 2), size((shape[4] - w + 1) / 2),
                                size(shape[2]), size(shape[0])};
    cuuint64_t const strides[4] = {bytes(2, 3), bytes(2, 4), bytes(1, 2), bytes(1, 0)};
    auto const* first = static_cast<float const*>(base) + h * stride[3] + w * stride[4];
    if (!encode_tensor_map(&maps[m], kMapTypes[p.dtype], 5, const_cast<float*>(first), dims, strides, box, step,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void fill_x(MainloopParams& m, Problem const& p, convt3d_tensors const& t, Slab const& s, int rows, int tiles_w,
            int stages) {
  Form const f = form(p);
  m.x = t.x;
  m.vectorized = p.x_alignment == 16 && (f.channels_last || p.in_size[2] % f.vector() == 0);
  int const fast = f.channels_last ? 1 : 4;  // the axis along which x is read
  // The stride of a dimension of size 1 is not checked by anyone, and the loader multiplies with it.
  Size5 const stride = effective_stride(x_shape(p), p.x_stride);
  for (int i = 0; i < 5; ++i) {
    m.x_stride[i] = i == fast ? 1 : stride[i];
    m.vectorized = m.vectorized && (i == fast || stride[i] % f.vector() == 0);
  }
  for (int axis = 0; axis < 3; ++axis) {
    m.in_size[axis] = static_cast<int>(p.in_size[axis]);
    m.window_lo[axis] = window(p.kernel[axis], p.padding[axis]).lo;
  }
  m.slab_pitch = s.pitch;
  m.slab_columns = s.columns;
  m.stage_bytes = s.bytes;
  m.in_channels = static_cast<int>(p.in_channels);
  m.slabs = slab_count(p);
  m.last_halves = ceil_div((p.in_channels - (m.slabs - 1) * (128 / f.element)) * f.element, 32 * f.element);
  // Of a single slab, what holds no channels stays as it was zeroed.
  m.groups = m.slabs > 1 ? 8 : ceil_div(p.in_channels, f.vector());
  m.rows = rows;
  // W positions to fetch, of NCDHW in whole vectors where possible. With one W tile those outside the tensor are never
  // written: they are zeroed once.
  int const unit = f.channels_last || !m.vectorized ? 1 : f.vector();
  int lo = m.window_lo[2];
  int end = kTileW + m.window_lo[2] + window(p.kernel[2], p.padding[2]).count - 1;
  if (tiles_w == 1) {
    lo = lo < 0 ? 0 : lo;
    end = end < p.in_size[2] ? end : static_cast<int>(p.in_size[2]);
  }
  m.fetch_lo = lo < 0 ? -ceil_div(-lo, unit) * unit : lo / unit * unit;
  m.fetch_count = end > m.fetch_lo ? ceil_div(end - m.fetch_lo, unit) : 1;
  m.item_rows = kLoaderWarps * 32 / (m.groups * m.fetch_count);
  m.stages = stages;
  m.divide_fastest = cutlass::FastDivmod(f.channels_last ? m.groups : m.fetch_count);
  m.divide_second = cutlass::FastDivmod(f.channels_last ? m.fetch_count : m.rows);
}

void fill_epilogue(EpilogueParams& e, Problem const& p, convt3d_tensors const& t, int ring) {
  Size5 const add_stride = effective_add_stride(p);
  bool const flat_add = add_stride[2] == 0 && add_stride[3] == 0 && add_stride[4] == 0;
  e.add_mode = !p.has_add ? AddMode::kNone : flat_add ? AddMode::kPerChannel : AddMode::kTile;
  e.add = t.add;
  e.add_stride[0] = add_stride[0];
  e.add_stride[1] = add_stride[1];
  e.bias = t.bias;
  e.bias_stride = p.bias_stride;
  e.has_bias = p.has_bias;
  e.activation = p.activation;
  e.add_after = p.add_order == CONVT3D_ADD_AFTER;
  e.negative_slope = p.negative_slope;
  e.slope_below = p.activation == CONVT3D_ACT_LEAKY_RELU ? p.negative_slope : 1.f;
  e.ring = ring;
  e.out_channels = static_cast<int>(p.out_channels);
  e.out_depth = static_cast<int>(output_size(p)[0]);
}

void fill_cold(ColdParams& cold, Problem const& p, convt3d_tensors const& t, int32_t const* suspects) {
  Size5 const add_stride = effective_add_stride(p);
  Size3 const out = output_size(p);
  cold.y = t.y;
  cold.add = t.add;
  cold.weight = t.weight;
  for (int i = 0; i < 5; ++i) {
    cold.y_stride[i] = p.y_stride[i];
    cold.add_stride[i] = add_stride[i];
    cold.weight_stride[i] = p.weight_stride[i];
  }
  for (int axis = 0; axis < 3; ++axis) {
    cold.out_size[axis] = static_cast<int>(out[axis]);
    cold.kernel[axis] = static_cast<int>(p.kernel[axis]);
    cold.stride[axis] = static_cast<int>(p.stride[axis]);
    cold.padding[axis] = static_cast<int>(p.padding[axis]);
  }
  cold.has_add = p.has_add;
  cold.in_channels = static_cast<int>(p.in_channels);
  cold.weight_suspect = suspects;
  cold.weight_suspects = kPrepareCtas;
}

bool fill_params(KernelParams& k, WeightParams& w, Problem const& p, Config const& c, convt3d_tensors const& t) {
  Form const f = form(p);
  Slab const s = slab(p);
  Tiling const tiles = tiling(p, c.run_length);
  int const blocks = class_blocks(p);
  Workspace const layout = workspace_layout(p, c);
  auto* workspace = static_cast<unsigned char*>(t.workspace);

  MainloopParams& m = k.mainloop;
  fill_x(m, p, t, s, weights_first(p) ? s.pitch : s.columns, tiles.tiles_w, c.stages);
  m.keep = c.keep;
  for (int axis = 0; axis < 3; ++axis) {
    w.window_lo[axis] = m.window_lo[axis];
    w.kernel[axis] = static_cast<int>(p.kernel[axis]);
    w.padding[axis] = static_cast<int>(p.padding[axis]);
  }
  m.depth_count = window(p.kernel[0], p.padding[0]).count;
  m.weights = workspace + layout.weights;
  m.weight_bytes = class_weight_bytes(p);
  int const offsets_w = window(p.kernel[2], p.padding[2]).count;
  m.offsets = window(p.kernel[1], p.padding[1]).count * offsets_w;
  for (int i = 0; i < m.offsets; ++i) m.operand_offset[i] = operand_offset(p, i / offsets_w, i % offsets_w);
  BlockPlaces const places = block_places(p);
  for (int i = 0; i < m.offsets; ++i) m.block_units[i] = places.at[i] / 16;
  m.block_step = places.bytes / 16;
  int first = 0;
  for (int group = 0; group < kGroups; ++group) {
    w.program[group] = group_program(p, group);
    DeviceProgram& d = m.program[group];
    for (int parity = 0; parity < 4; ++parity) {
      d.factor[parity] = loss_factor(p.dtype, products_of(p, group, parity / 2, parity % 2));
    }
    d.first_byte = image_offset(places, m.offsets, first);
    d.last_live = -1;
    for (int s = 0; s < m.depth_count; ++s) {
      d.live[s] = slice_live(p, group, s);
      if (d.live[s] != 0) d.last_live = s;
    }
    first += w.program[group].count();
  }

  EpilogueParams& e = k.epilogue;
  fill_epilogue(e, p, t, c.ring);
  auto encode = [&](CUtensorMap* maps, int32_t& merged, void const* base, int64_t const* stride) {
    if (f.channels_last && weights_first(p)) return encode_parities(maps, p, base, stride);
    merged = can_merge(p, stride);
    return encode_units(maps, p, base, stride, merged);
  };
  if (!encode(e.y_map, e.y_merged, t.y, p.y_stride)) return false;
  if (e.add_mode == AddMode::kTile && !encode(e.add_map, e.add_merged, t.add, p.add_stride)) return false;

  SchedulerParams& sp = k.scheduler;
  sp.counters = reinterpret_cast<int32_t*>(workspace + layout.counters);
  sp.owners = reinterpret_cast<int32_t*>(workspace + layout.owners);
  sp.classes = class_count(p);
  sp.runs = static_cast<int>(tiles.runs);
  sp.run_length = c.run_length;
  sp.pairs_d = tiles.pairs[0];
  sp.divide_tiles_h = cutlass::FastDivmod(tiles.tiles_h);
  sp.divide_tiles_w = cutlass::FastDivmod(tiles.tiles_w);
  sp.divide_runs_d = cutlass::FastDivmod(tiles.runs_d);

  fill_cold(k.cold, p, t, reinterpret_cast<int32_t const*>(workspace + layout.suspects));
  for (int i = 0; i < 5; ++i) w.weight_stride[i] = p.weight_stride[i];
  w.in_channels = static_cast<int>(p.in_channels);
  int64_t const* const ws = p.weight_stride;
  w.taps_dense = ws[4] == 1 && ws[3] == p.kernel[2] && ws[2] == p.kernel[1] * ws[3] && ws[1] == p.kernel[0] * ws[2];

  w.weight = t.weight;
  w.out_channels = static_cast<int>(p.out_channels);
  w.channels_last = f.channels_last;
  w.weights_first = weights_first(p);
  w.classes = sp.classes;
  w.blocks = blocks;
  w.places = places;
  w.offsets = m.offsets;
  w.class_bytes = m.weight_bytes;
  w.image = workspace + layout.weights;
  w.counters = sp.counters;
  w.owners = sp.owners;
  w.owner_count = static_cast<int64_t>(sp.classes) * sp.runs;
  w.suspect = reinterpret_cast<int32_t*>(workspace + layout.suspects);
  return true;
}

}  // namespace convt3d::sm90
