// SPDX-License-Identifier: Apache-2.0
//
// What the host chooses for the streaming kernel: paths of add and y, stages and ring, the workspace's layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "sm90/stream/choose.hpp"
#include "sm90/stream/parts.hpp"
#include "sm90/stream/rows.hpp"
#include "sm90_emulation.hpp"
#include "sm90_stream_problem.hpp"

namespace convt3d::sm90::stream {
namespace {

TEST(Sm90Stream, PathsOfAddAndY) {
  auto y_path = [](Problem const& p) { return choose_paths(p).y; };
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16}) {
    Path const narrow = dtype == CONVT3D_F32 ? Path::kPlain4 : Path::kPlain2;
    for (int width = 8; width < 24; ++width) {
      Problem const p = make(8, 16, {3, 9, width}, {3, 3, 2}, {1, 1, 0}, {1, 1, 0}, dtype);
      EXPECT_EQ(y_path(p), 2 * width * element_bytes(p) % 16 == 0 ? Path::kBoxes : Path::kPlain4);
      EXPECT_EQ(y_path(make(8, 16, {3, 9, width}, {3, 3, 3}, {1, 1, 1}, {1, 1, 0}, dtype)), narrow);
      EXPECT_EQ(y_path(make(8, 16, {3, 9, width}, {3, 3, 3}, {1, 1, 1}, {1, 1, 0}, dtype, true)), Path::kBoxes);
    }
    Problem p = make(8, 16, {3, 9, 16}, {3, 3, 2}, {1, 1, 0}, {1, 1, 0}, dtype);
    p.has_add = 1;
    p.add_alignment = element_bytes(p);
    p.precision = CONVT3D_TF32;
    EXPECT_EQ(choose_paths(p).add, dtype == CONVT3D_F32 ? Path::kPlain4 : Path::kShift4);
    EXPECT_EQ(y_path(p), Path::kBoxes);
    if (dtype == CONVT3D_F32) {  // in ieee mode the one warp that stores y loads add then
      p.precision = CONVT3D_IEEE;
      EXPECT_EQ(choose_paths(p).add, narrow);
      EXPECT_EQ(y_path(p), Path::kPlain4);
    }
    p.add_alignment = 8;
    EXPECT_EQ(choose_paths(p).add, Path::kPlain4);
    for (int axis = 2; axis < 5; ++axis) p.add_stride[axis] = 0;
    EXPECT_EQ(choose_paths(p).add, Path::kBoxes);
    EXPECT_EQ(y_path(make(8, 14, {3, 9, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, true)), Path::kPlain4);
    EXPECT_EQ(y_path(make(8, 13, {3, 9, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, true)), narrow);
    EXPECT_EQ(y_path(make(8, 16, {3, 9, 16}, {2, 4, 4}, {0, 0, 0}, {0, 0, 0}, dtype, false, {2, 4, 4})), Path::kPlain4);
    EXPECT_EQ(y_path(make(8, 16, {3, 9, 16}, {3, 3, 3}, {0, 0, 0}, {0, 0, 0}, dtype, false, {3, 3, 3})), narrow);
  }
}

TEST(Sm90Stream, EverythingFitsIntoSharedMemory) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_BF16}) {
    for (bool last : {false, true}) {
      for (int k = 2; k <= kMaxKernel; ++k) {
        Problem p = make(320, 320, {8, 8, 8}, {k, k, k}, {k / 3, k / 3, k / 3}, {0, 0, 0}, dtype, last);
        for (convt3d_precision precision : {CONVT3D_TF32, CONVT3D_IEEE}) {
          p.precision = precision;
          Config const c = choose_config(p);
          EXPECT_LE(shared_bytes(p, c), kSharedLimit);
          EXPECT_GE(c.ring, uses_split(p) ? 8 : 5);
          EXPECT_LE(c.ring, kLargestRing);
          EXPECT_LE(c.stages, kLargestStages);
          EXPECT_GE(c.slots, 4);
          EXPECT_LE(c.slots, kMaxSlots);
          EXPECT_GE(c.stages, most_planes(p) + (uses_split(p) ? 0 : 1));
        }
      }
    }
  }
}

TEST(Sm90Stream, TheLastItemsComeClassByClass) {
  Problem p = make(64, 64, {9, 9, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1});
  EXPECT_EQ(places_by_class(p, 2048, 132), 132);
  EXPECT_EQ(places_by_class(p, 100, 132), 100);  // all of them
  p = make(64, 64, {9, 9, 16}, {4, 4, 4}, {1, 1, 1}, {0, 0, 0});
  EXPECT_EQ(places_by_class(p, 2048, 132), 0);                    // all classes are as long
  p = make(64, 64, {9, 9, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 0});  // rows of 31
  p.precision = CONVT3D_IEEE;
  EXPECT_EQ(places_by_class(p, 2048, 132), 66);
  p.precision = CONVT3D_TF32;
  EXPECT_EQ(places_by_class(p, 2048, 132), 0);
}

TEST(Sm90Stream, TilesAreNarrowWhereThatLeavesFewerPositionsEmpty) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_BF16}) {
    for (bool last : {false, true}) {
      auto with = [&](int width) {
        return make(256, 128, {9, 9, width}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last);
      };
      for (int width : {8, 12, 20, 24, 36}) EXPECT_EQ(tile_width(with(width)), kNarrowTileW) << width;
      for (int width : {16, 28, 32, 40, 48, 64, 72, 80, 96, 128}) EXPECT_EQ(tile_width(with(width)), kTileW) << width;
      Problem p = with(24);
      EXPECT_EQ(tiling(p).tiles[2], 2);
      EXPECT_EQ(slab(p).columns, 13);
      p.activation = CONVT3D_ACT_GELU;
      EXPECT_EQ(tile_width(p), kTileW);
      p.activation = CONVT3D_ACT_LEAKY_RELU;
      EXPECT_EQ(tile_width(p), kNarrowTileW);
      p.add_order = CONVT3D_ADD_AFTER;
      EXPECT_EQ(tile_width(p), kTileW);
      p.add_order = CONVT3D_ADD_BEFORE;
      p.y_alignment = 8;
      EXPECT_EQ(tile_width(p), kTileW);
    }
  }
}

TEST(Sm90Stream, LargeSlabsLeaveRoomForTheRing) {
  for (bool last : {false, true}) {
    Problem p = make(96, 48, {64, 64, 32}, {3, 3, 1}, {1, 1, 0}, {1, 1, 0}, CONVT3D_F32, last, {2, 2, 1});
    p.precision = CONVT3D_TF32;
    Config const c = choose_config(p);
    EXPECT_EQ(c.stages, most_planes(p));
    EXPECT_EQ(c.slots, 4);
    EXPECT_GE(c.ring, 8);
    EXPECT_LE(shared_bytes(p, c), kSharedLimit);
    // k4, with nothing but a piece to give.
    Problem q = make(192, 96, {32, 32, 32}, {4, 4, 4}, {1, 1, 1}, {0, 0, 0}, CONVT3D_F32, last);
    q.precision = CONVT3D_TF32;
    EXPECT_EQ(choose_config(q).stages, most_planes(q) + 1);
    EXPECT_EQ(choose_config(q).slots, 5);
  }
}

TEST(Sm90Stream, WorkspacePartsDoNotOverlap) {
  Problem const p = make(256, 128, {5, 9, 18}, {3, 3, 3}, {1, 1, 1}, {0, 1, 0});
  Workspace const w = workspace_layout(p);
  EXPECT_LE(4u, w.owners);
  EXPECT_EQ(tiling(p).items, 2 * 2 * 4 * 3 * 2 * 2);
  EXPECT_LE(w.owners + tiling(p).items * 4, w.pieces);
  EXPECT_EQ(w.pieces % 128, 0u);
  EXPECT_EQ(w.pieces + size_t{2} * 27 * 8 * kPieceBytes, w.x);
  EXPECT_EQ(w.x + element_count(x_shape(p)) * 4, w.bytes);
}

TEST(Sm90Stream, WorkspaceInIeeeMode) {
  Problem p = make(72, 136, {5, 9, 18}, {3, 3, 3}, {1, 1, 1}, {0, 1, 0});
  p.precision = CONVT3D_TF32;
  EXPECT_EQ(workspace_layout(p).scans, workspace_layout(p).pieces);
  EXPECT_EQ(padded_channels(p), 72);
  p.precision = CONVT3D_IEEE;
  Workspace const w = workspace_layout(p);
  size_t const tiles = 3;
  EXPECT_LE(w.owners + static_cast<size_t>(tiling(p).items) * 4, w.scans);
  EXPECT_LE(w.scans + kScanResults * 4, w.weight_scans);
  EXPECT_LE(w.weight_scans + tiles * kWeightScanResults * 4, w.weight_exponents);
  EXPECT_LE(w.weight_exponents + tiles * 4, w.state);
  EXPECT_LE(w.state + sizeof(SplitState), w.tiny_x);
  EXPECT_LE(w.tiny_x + 2 * 5 * 4, w.pieces);  // for each plane
  EXPECT_EQ(w.pieces + tiles * 27 * 3 * kPieceBytes, w.x);
  // Whole slabs of parts: 96 channels for 72.
  EXPECT_EQ(w.x + size_t{2} * 5 * 9 * 18 * 96 * 4, w.bytes);
}

// Of 32 channels, parts have 64 bytes of hi and 64 of lo where fp32 has 128. What the pre-kernel writes channel by
// channel is what wgmma reads at byte 2 k of a row's hi, and 64 bytes further of its lo, through the swizzle.
TEST(Sm90Stream, PartsLieWhereTheProductsReadThem) {
  std::vector<int> seen(kPieceBytes / 2);
  for (int row = 0; row < kTileChannels; ++row) {
    for (int channel = 0; channel < 32; ++channel) {
      for (int low : {0, kLowPart}) {
        int const at = piece_offset(row, parts_offset(channel / 4) + low) + channel % 4 * 2;
        EXPECT_EQ(at, swizzled(row * 128 + low + channel * 2, 128));
        ++seen.at(static_cast<size_t>(at / 2));
      }
      EXPECT_EQ(piece_offset(row, parts_offset(channel / 4)) + channel % 4 * 2, split_weight_offset(row, channel));
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kPieceBytes / 2);
}

}  // namespace
}  // namespace convt3d::sm90::stream
