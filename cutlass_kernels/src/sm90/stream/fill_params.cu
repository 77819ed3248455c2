// SPDX-License-Identifier: Apache-2.0
#include "sm90/sample.hpp"
#include "sm90/stream/choose.hpp"
#include "sm90/stream/params.hpp"
#include "sm90/stream/parts.hpp"
#include "sm90/sums.hpp"
#include "sm90/tensor_map.hpp"

namespace convt3d::sm90::stream {
namespace {

/// Maps of a tensor with the shape of y, whose boxes are units or halves of them. NCDHW: over (W, H / m, C, D, N) for
/// each H modulo m, where m is twice the stride. NDHWC: over (C, H / m, W, D, N), where m is the stride.
bool encode_units(CUtensorMap* maps, Problem const& p, void const* base, int64_t const* stride) {
  Size5 const shape = y_shape(p);
  Form const f = form(p);
  int const ways = static_cast<int>(f.channels_last ? p.stride[1] : 2 * p.stride[1]);  // kMostMaps at most
  auto bytes = [&](int64_t factor, int axis) {
    return static_cast<cuuint64_t>(shape[axis] == 1 ? 16 : factor * stride[axis] * f.element);
  };
  cuuint32_t const step[5] = {1, 1, 1, 1, 1};
  auto size = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  for (int m = 0; m < ways; ++m) {
    cuuint64_t const parts = size((shape[3] - m + ways - 1) / ways);
    cuuint64_t const dims_ncdhw[5] = {size(shape[4]), parts, size(shape[1]), size(shape[2]), size(shape[0])};
    cuuint64_t const dims_ndhwc[5] = {size(shape[1]), parts, size(shape[4]), size(shape[2]), size(shape[0])};
    cuuint64_t const strides_ncdhw[4] = {bytes(ways, 3), bytes(1, 1), bytes(1, 2), bytes(1, 0)};
    cuuint64_t const strides_ndhwc[4] = {bytes(ways, 3), bytes(1, 4), bytes(1, 2), bytes(1, 0)};
    auto const units = static_cast<cuuint32_t>(units_per_warp(f.element));
    auto const width = static_cast<cuuint32_t>(tile_width(p));
    cuuint32_t const box_ncdhw[5] = {2 * width, kTileH / 2, 16 / units, 1, 1};
    cuuint32_t const box_ndhwc[5] = {16, kTileH, 2 * width / units, 1, 1};
    CUtensorMapSwizzle const swizzle = f.channels_last
                                           ? (f.element == 4 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B)
                                           : (f.element == 4 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
    auto const* first = static_cast<unsigned char const*>(base) + m * stride[3] * f.element;
    if (!encode_tensor_map(&maps[m], kMapTypes[p.dtype], 5, const_cast<unsigned char*>(first),
                           f.channels_last ? dims_ndhwc : dims_ncdhw, f.channels_last ? strides_ndhwc : strides_ncdhw,
                           f.channels_last ? box_ndhwc : box_ncdhw, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
      return false;
    }
  }
  return true;
}

/// The pre-pass that makes a packed channels-last copy of x, and the map of that copy or of x itself.
bool fill_x_pass(StreamParams& k, PieceParams& w, prepare::Params& x, Problem const& p, convt3d_tensors const& t,
                 void* copy) {
  Size5 const shape = x_shape(p);
  Size5 const strides = effective_stride(shape, p.x_stride);
  int const element = element_bytes(p);
  int const vector = 16 / element;
  int64_t const channels = padded_channels(p);
  bool const in_place = reads_x_in_place(p);
  for (int axis = 0; axis < 5; ++axis) k.x.x_stride[axis] = p.x_stride[axis];

  // The voxels of a sample are one equally spaced run, W fastest.
  bool const flat = strides[3] == strides[4] * shape[4] && strides[2] == strides[3] * shape[3];
  bool const packed_last = flat && strides[1] == 1 && strides[4] == shape[1] && shape[1] == channels &&
                           (shape[0] == 1 || strides[0] == strides[2] * shape[2]) && p.x_alignment == 16;
  w.voxels = shape[2] * shape[3] * shape[4];
  bool const turns = flat && strides[4] == 1 && p.x_alignment == 16 && w.voxels % vector == 0 &&
                     strides[1] % vector == 0 && strides[0] % vector == 0;
  w.x = t.x;
  w.x_out = copy;
  w.x_channels = static_cast<int32_t>(channels);
  w.x_sample_stride = strides[0];
  w.x_channel_stride = strides[1];
  w.voxel_tiles = (w.voxels + 127) / 128;
  w.x_vectors = shape[0] * w.voxels * channels / vector;
  if (in_place) {
    w.x_pass = XPass::kNone;
  } else if (packed_last) {
    w.x_pass = XPass::kCopy;
    w.x_blocks = (w.x_vectors + kCopiesPerThread * kPrepareThreads - 1) / (kCopiesPerThread * kPrepareThreads);
  } else if (turns) {
    w.x_pass = XPass::kTurn;
    w.x_blocks = shape[0] * w.voxel_tiles * slab_count(p);
  } else if (uses_split(p)) {
    w.x_pass = XPass::kGather;
    w.x_blocks = (w.x_vectors + kPrepareThreads - 1) / kPrepareThreads;
  } else {
    w.x_pass = XPass::kNone;
    prepare::set_x(x, p, t.x, copy, channels);
  }

  Size5 const stride = in_place ? strides : prepare::packed_stride(shape, channels);
  auto size = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  auto bytes = [&](int axis) { return shape[axis] == 1 ? cuuint64_t{16} : size(stride[axis] * element); };
  Slab const s = slab(p);
  cuuint64_t const dims[5] = {size(in_place ? shape[1] : channels), size(shape[3]), size(shape[4]), size(shape[2]),
                              size(shape[0])};
  cuuint64_t const steps[4] = {bytes(3), bytes(4), bytes(2), bytes(0)};
  cuuint32_t const box[5] = {static_cast<cuuint32_t>(128 / element), static_cast<cuuint32_t>(s.pitch),
                             static_cast<cuuint32_t>(s.columns), 1, 1};
  cuuint32_t const one[5] = {1, 1, 1, 1, 1};
  k.box_bytes = 128 * s.pitch * s.columns;
  CUtensorMapDataType const type =
      in_place && p.dtype == CONVT3D_F32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : kMapTypes[p.dtype];
  return encode_tensor_map(&k.x_map, type, 5, const_cast<void*>(in_place ? t.x : copy), dims, steps, box, one,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

bool fill_maps(StreamParams& k, Problem const& p, convt3d_tensors const& t) {
  EpilogueParams& e = k.epilogue;
  k.plain = {choose_paths(p), plain_extent(p)};
  if (k.plain.path.y == Path::kBoxes && !encode_units(e.y_map, p, t.y, p.y_stride)) return false;
  return e.add_mode != AddMode::kTile || k.plain.path.add != Path::kBoxes ||
         encode_units(e.add_map, p, t.add, effective_add_stride(p).v);
}

/// The order in which items are handed out.
void fill_order(StreamParams& k, Problem const& p, int64_t items, int multiprocessors) {
  ClassOrder const order = class_order(p);
  for (int rank = 0; rank < k.classes; ++rank) k.class_order[rank] = order.cls[rank];
  auto const places = static_cast<int>(items) / k.classes;
  int const last = places_by_class(p, places, multiprocessors);
  k.places_before_last = places - last;
  k.first_of_last = k.places_before_last * k.classes;
  k.divide_last = cutlass::FastDivmod(last > 0 ? last : 1);
}

}  // namespace

bool fill_params(StreamParams& k, PieceParams& w, prepare::Params& x, Problem const& p, Config const& c,
                 convt3d_tensors const& t, int multiprocessors) {
  Form const f = form(p);
  Tiling const tiles = tiling(p);
  Workspace const layout = workspace_layout(p);
  auto* workspace = static_cast<unsigned char*>(t.workspace);

  fill_x(k.x, p, t, slab(p), slab(p).pitch, tiles.tiles[2], c.stages);
  k.x.window_lo[1] = rows_window(p).lo;
  k.x.window_lo[2] = columns_window(p).lo;
  k.stride_d = static_cast<int>(p.stride[0]);
  k.stride_h = static_cast<int>(p.stride[1]);
  k.classes = w.classes = class_total(p);
  k.tile_width = tile_width(p);
  k.tile_columns = k.tile_width * column_step(p);
  if (!fill_x_pass(k, w, x, p, t, workspace + layout.x)) return false;
  int const pitch = slab(p).pitch;
  int first = 0;
  for (int cls = 0; cls < k.classes; ++cls) {
    Program const g = w.program[cls] = program(p, cls);
    DeviceClass& d = k.cls[cls];
    d.first_piece = w.first_piece[cls] = first;
    first += class_pieces(p, cls);
    d.depth_lo = g.depth.lo;
    d.depth_count = g.depth.count;
    d.height_count = g.height.count;
    d.direct = direct_pieces(p, cls);
    for (int parity = 0; parity < 2; ++parity) {
      d.width_count[parity] = g.width[parity].count;
      d.factor[parity] = loss_factor(p.dtype, p.in_channels * g.depth.count * g.height.count * g.width[parity].count);
    }
    for (int i = 0; i < g.pieces(); ++i) {
      Piece const piece = g.place(i);
      d.operand_offset[i] = static_cast<int16_t>(
          operand_offset(pitch, piece.delta[1] - k.x.window_lo[1], piece.delta[2] - k.x.window_lo[2]));
    }
  }
  k.pieces = w.pieces = workspace + layout.pieces;
  k.tile_pieces = w.tile_pieces = tile_pieces(p);
  k.slots = c.slots;
  fill_order(k, p, tiles.items, multiprocessors);
  k.divide_classes = cutlass::FastDivmod(k.classes);
  k.divide_channels = cutlass::FastDivmod(channel_tiles(p));
  k.divide_tiles_d = cutlass::FastDivmod(tiles.tiles[0]);
  k.divide_tiles_h = cutlass::FastDivmod(tiles.tiles[1]);
  k.divide_tiles_w = cutlass::FastDivmod(tiles.tiles[2]);
  k.divide_pairs = cutlass::FastDivmod(pairs_w(p));
  k.divide_stride_h = cutlass::FastDivmod(k.stride_h);

  fill_epilogue(k.epilogue, p, t, c.ring);
  if (!fill_maps(k, p, t)) return false;

  SchedulerParams& sp = k.scheduler;
  sp.counters = w.counter = reinterpret_cast<int32_t*>(workspace + layout.counter);
  sp.owners = w.owners = reinterpret_cast<int32_t*>(workspace + layout.owners);
  sp.classes = 1;
  sp.runs = static_cast<int>(tiles.items);
  sp.run_length = 1;
  w.owner_count = tiles.items;

  if (uses_split(p)) {
    auto words = [&](size_t offset) { return reinterpret_cast<uint32_t*>(workspace + offset); };
    k.split.x_largest = words(layout.scans);
    k.split.weight_largest = words(layout.weight_scans);
    k.split.weight_exponent = reinterpret_cast<int32_t*>(workspace + layout.weight_exponents);
    k.split.state = reinterpret_cast<SplitState*>(workspace + layout.state);
    k.split.tiny_x = words(layout.tiny_x);
    k.split.products = static_cast<uint32_t>(most_products(p));
    k.split.too_many_bad = too_many_bad(element_count(x_shape(p)));
    k.split.too_many_tiny = too_many_tiny(element_count(x_shape(p)));
    w.split = k.split;
    w.sample = scan_params(p, t.x);
    choose_sample(w.sample, kScanResults * (kSampleThreads / 32));
    w.head_room = w.sample.step > 1 ? kPartsHeadRoom : 0;
    w.batch = static_cast<int32_t>(p.batch);
    for (int axis = 0; axis < 3; ++axis) {
      w.in_size[axis] = static_cast<int32_t>(p.in_size[axis]);
      w.kernel[axis] = static_cast<int32_t>(p.kernel[axis]);
    }
    Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
    for (int axis = 0; axis < 5; ++axis) w.x_stride[axis] = x_stride[axis];
  }

  fill_cold(k.cold, p, t, nullptr);
  for (int i = 0; i < 5; ++i) w.weight_stride[i] = p.weight_stride[i];
  w.weight = t.weight;
  w.in_channels = static_cast<int>(p.in_channels);
  w.out_channels = static_cast<int>(p.out_channels);
  w.slabs = k.x.slabs;
  w.pairs_channels = pairs_channels(f.channels_last, f.element);
  w.channel_tiles = channel_tiles(p);
  int64_t const piece_vectors = static_cast<int64_t>(w.channel_tiles) * w.tile_pieces * (kPieceBytes / 16);
  int64_t const piece_blocks = (piece_vectors + kPrepareThreads - 1) / kPrepareThreads;
  w.piece_ctas = static_cast<int32_t>(piece_blocks < kPieceCtas ? piece_blocks : kPieceCtas);
  w.piece_every = static_cast<int32_t>(1 + w.x_blocks / w.piece_ctas);
  return true;
}

}  // namespace convt3d::sm90::stream
