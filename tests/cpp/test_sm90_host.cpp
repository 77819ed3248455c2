// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family's host mathematics. The heart is an emulation of one tile on the CPU: shared memory, wgmma's reading
// of swizzled operands and its accumulator layout, and the copy engine's boxes, against a gather by the definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "sm90/sums.hpp"
#include "sm90_emulation.hpp"
#include "sm90_problems.hpp"

namespace convt3d::sm90 {
namespace {

// ---- windows and blocks ----------------------------------------------------------------------------------------

TEST(Sm90Geometry, WindowHoldsExactlyTheLiveDeltas) {
  for (int64_t k = 2; k <= 4; ++k) {
    for (int64_t padding = 0; padding <= 9; ++padding) {
      Window const w = window(k, padding);
      EXPECT_LE(w.count, kMaxWindow);
      for (int delta = -20; delta <= 20; ++delta) {
        bool const live = is_live(0, delta, k, padding) || is_live(1, delta, k, padding);
        EXPECT_EQ(live, delta >= w.lo && delta < w.lo + w.count) << k << ' ' << padding << ' ' << delta;
      }
    }
  }
}

TEST(Sm90Geometry, EveryTapIsInOneBlockOfItsGroup) {
  for (int k = 2; k <= 4; ++k) {
    for (int padding = 0; padding <= 3; ++padding) {
      Problem const p = make(1, 32, 16, {9, 9, 9}, {k, k, k}, {padding, padding, padding}, {0, 0, 0});
      std::map<int64_t, int> seen;  // (output parity, tap)
      for (int group = 0; group < kGroups; ++group) {
        GroupProgram const program = group_program(p, group);
        for (int b = 0; b < program.count(); ++b) {
          for (int parity = 0; parity < 4; ++parity) {
            int const r[3] = {group, parity / 2, parity % 2};
            int64_t key = group * 4 + parity;
            bool live = true;
            for (int axis = 0; axis < 3; ++axis) {
              int const delta = window(k, padding).lo + program.block(b).delta[axis];
              live = live && is_live(r[axis], delta, k, padding);
              key = key * 8 + tap_of(r[axis], delta, padding);
            }
            if (live) ++seen[key];
          }
        }
      }
      EXPECT_EQ(static_cast<int>(seen.size()), k * k * k);
      std::vector<int64_t> products(8);
      for (auto const& [key, count] : seen) {
        EXPECT_EQ(count, 1) << key;
        products[key / 512] += p.in_channels;
      }
      for (int parities = 0; parities < 8; ++parities) {
        EXPECT_EQ(products[parities], products_of(p, parities / 4, parities / 2 % 2, parities % 2));
      }
    }
  }
}

TEST(Sm90Sums, WhatTheyGetBackIsLessThanTheBound) {
  for (int64_t products : {1, 8, 32, 256, 512, 4096}) {
    for (int32_t dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
      float const factor = loss_factor(dtype, products);
      EXPECT_GE(factor, 1.0f);
      EXPECT_LT(factor, 1.0f + (dtype == CONVT3D_F32 ? 8 : 4) * 0x1p-22f);
      EXPECT_GE(loss_factor(dtype, 2 * products), factor);
    }
  }
  EXPECT_EQ(loss_factor(CONVT3D_F32, 256), 1.0f + 0x1p-20f);
  EXPECT_EQ(loss_factor(CONVT3D_F16, 256), 1.0f + 0.875f * 0x1p-20f);
  EXPECT_EQ(loss_factor(CONVT3D_F16, 512), loss_factor(CONVT3D_F16, 256));
  EXPECT_EQ(loss_factor(CONVT3D_BF16, 512), 1.0f + 0.5f * 0x1p-20f);
}

TEST(Sm90Geometry, BlockRowsAreEveryChannelAndParityOnce) {
  for (int element : {2, 4}) {
    for (int format : {0, 1, 2}) {  // NCDHW, NDHWC, NDHWC with the weights as A
      if (element == 2 && format == 2) continue;
      std::map<std::vector<int>, int> seen;
      for (int row = 0; row < block_rows(element); ++row) {
        BlockRow const r = block_row(format > 0, format != 1, element, 3, 1, row);
        EXPECT_EQ(r.parity[0], 1);
        EXPECT_GE(r.channel, 3 * class_channels(element));
        EXPECT_LT(r.channel, 4 * class_channels(element));
        ++seen[{r.channel, r.parity[1], r.parity[2]}];
      }
      EXPECT_EQ(static_cast<int>(seen.size()), block_rows(element));
    }
  }
}

// ---- one tile on the CPU ---------------------------------------------------------------------------------------

/// A tile of one D plane pair, computed as the kernel does, in exact integers.
class Tile {
 public:
  Tile(Problem const& p, int cls, int tile_h, int tile_w)
      : p_(p),
        f_(form(p)),
        first_(weights_first(p)),
        slab_(slab(p)),
        cls_(cls),
        h0_(tile_h * kTileH),
        w0_(tile_w * kTileW) {}

  /// Outputs (channel, oh, ow) of D parity `group` and D pair `d`.
  void expect_outputs(int group, int d) {
    GroupProgram const program = group_program(p_, group);
    int const parts = !first_ || f_.element == 2 ? 2 : 1;
    int const rows = first_ ? 128 : 64;                            // positions of a part
    int const weight_rows = first_ ? 64 : block_rows(f_.element);  // likewise
    std::vector<std::vector<int>> sum(parts, std::vector<int>(rows * weight_rows));
    int block = 0;
    for (int s = 0; s < window(p_.kernel[0], p_.padding[0]).count; ++s) {
      if (!slice_live(p_, group, s)) continue;
      for (int c = 0; c < slab_count(p_); ++c) {
        std::vector<int> const stage = make_stage(d + window(p_.kernel[0], p_.padding[0]).lo + s, c);
        int const left = channel_blocks(p_.in_channels) - c * (128 / f_.element / 32);
        for (int half = 0; half < std::min(left, 128 / f_.element / 32); ++half) {
          for (int i = 0; i < program.height * program.width; ++i, ++block) {
            Block const b = program.block(block);
            ASSERT_EQ(b.delta[0], s);
            int const view = operand_offset(p_, i / program.width, i % program.width) * 16 + half * 64;
            multiply(stage, make_image(b, group), view, parts, rows, weight_rows, sum);
          }
        }
      }
    }
    ASSERT_EQ(block, program.count());
    for (int warp = 0; warp < 4; ++warp) expect_unit(sum, warp, group, d, weight_rows);
  }

 private:
  /// sum += the operand at byte `view` of a slab times a weight block, position by weight row.
  void multiply(std::vector<int> const& stage, std::vector<int> const& image, int view, int parts, int rows,
                int weight_rows, std::vector<std::vector<int>>& sum) const {
    for (int part = 0; part < parts; ++part) {
      for (int r = 0; r < rows; ++r) {
        int const start = view + (first_ ? 0 : part * 8 * 128);
        int const row_at = start + r / 8 * slab_.pitch * 128 + r % 8 * 128;
        for (int wr = 0; wr < weight_rows; ++wr) {
          int const weight_row = (first_ ? part * 64 : 0) + wr;
          for (int k = 0; k < 32; ++k) {
            int const x_at = swizzled(row_at + k * f_.element, 128);
            int const w_at = swizzled(weight_row * 32 * f_.element + k * f_.element, 32 * f_.element);
            sum[part][r * weight_rows + wr] += stage.at(x_at / f_.element) * image.at(w_at / f_.element);
          }
        }
      }
    }
  }

  /// Slab `slab` of shared memory as the loader leaves it, in elements.
  std::vector<int> make_stage(int d, int slab) const {
    std::vector<int> stage(slab_.bytes / f_.element);
    int const channels = 128 / f_.element;
    Window const wh = window(p_.kernel[1], p_.padding[1]);
    Window const ww = window(p_.kernel[2], p_.padding[2]);
    for (int i = 0; i < kTileH + wh.count - 1; ++i) {
      for (int j = 0; j < kTileW + ww.count - 1; ++j) {
        int const h = h0_ + wh.lo + i;
        int const w = w0_ + ww.lo + j;
        bool const inside = d >= 0 && d < p_.in_size[0] && h >= 0 && h < p_.in_size[1] && w >= 0 && w < p_.in_size[2];
        int const row = first_ ? j * slab_.pitch + i : i * slab_.pitch + j;
        for (int c = 0; inside && c < channels && slab * channels + c < p_.in_channels; ++c) {
          int const at = slab_offset(row, c / f_.vector()) + c % f_.vector() * f_.element;
          stage.at(at / f_.element) = x_value(slab * channels + c, d, h, w);
        }
      }
    }
    return stage;
  }

  std::vector<int> make_image(Block const& b, int group) const {
    std::vector<int> image(kWeightBlockBytes / f_.element);
    for (int row = 0; row < block_rows(f_.element); ++row) {
      BlockRow const target = block_row(f_.channels_last, first_, f_.element, cls_, group, row);
      for (int k = 0; k < 32; ++k) {
        int tap[3];
        bool live = target.channel < p_.out_channels && b.channel_block * 32 + k < p_.in_channels;
        for (int axis = 0; axis < 3; ++axis) {
          int const delta = window(p_.kernel[axis], p_.padding[axis]).lo + b.delta[axis];
          tap[axis] = tap_of(target.parity[axis], delta, p_.padding[axis]);
          live = live && tap[axis] >= 0 && tap[axis] < p_.kernel[axis];
        }
        if (!live) continue;
        image.at(weight_offset(f_.element, row, k) / f_.element) =
            weight_value(b.channel_block * 32 + k, target.channel, tap[0], tap[1], tap[2]);
      }
    }
    return image;
  }

  /// Every accumulator of a warp through the unit's addresses and the copy engine's box to its output.
  void expect_unit(std::vector<std::vector<int>> const& sum, int warp, int group, int d, int weight_rows) const {
    int const width = f_.channels_last || f_.element == 2 ? 64 : 128;
    std::vector<int> unit(kUnitBytes / f_.element, -1000000);
    int const columns = first_ ? 128 : weight_rows;
    for (int lane = 0; lane < 32; ++lane) {
      for (int part = 0; part < static_cast<int>(sum.size()); ++part) {
        for (int i = 0; i < columns / 2; ++i) {
          // wgmma's accumulator: register i is row lane / 4 + 8 half of the warp's 16, column 8 j + 2 (lane % 4) + b.
          int const j = i / 4, half = i / 2 % 2, b = i % 2;
          int const m = warp * 16 + lane / 4 + 8 * half;
          int const n = 8 * j + lane % 4 * 2 + b;
          int row, chunk, at, value;
          if (f_.channels_last && first_) {
            row = unit_row_pairs(lane, j, b);
            chunk = lane / 8;
            at = lane / 4 % 2 * 2 + half;
            value = sum[part][n * weight_rows + m];
          } else if (f_.channels_last) {
            int const per_parity = f_.vector() / 2;
            int const parity = j / per_parity;
            row = unit_row_ndhwc(lane, part, half, parity / 2, parity % 2);
            chunk = lane % 4;
            at = j % per_parity * 2 + b;
            value = sum[part][m * weight_rows + n];
          } else {
            int const ow = 2 * j + half;
            row = unit_row_ncdhw(f_.element, lane, b, part);
            chunk = ow / f_.vector();
            at = ow % f_.vector();
            value = sum[part][n * weight_rows + m];
          }
          int const address = swizzled(row * width + chunk * 16, width) + at * f_.element;
          ASSERT_EQ(unit.at(address / f_.element), -1000000) << "written twice";
          unit.at(address / f_.element) = value;
        }
      }
    }
    // The box, innermost first: (W 32, H / 4, C, D, H mod 4) or (C, W / 2, H, D, W mod 2).
    int const inner = width / f_.element;
    for (int index = 0; index < kUnitBytes / f_.element; ++index) {
      int const i0 = index % inner;
      int const rest = index / inner;
      int c, oh, ow;
      if (f_.channels_last && first_) {  // (C, H / 2, W / 2) of the warp's parity
        c = cls_ * class_channels(f_.element) + i0;
        ow = 2 * (w0_ + rest / kTileH) + warp_parity(warp, true);
        oh = 2 * (h0_ + rest % kTileH) + warp_parity(warp, false);
      } else if (f_.channels_last) {
        c = cls_ * class_channels(f_.element) + i0;
        ow = 2 * w0_ + 2 * (rest % 16) + rest / 64;
        oh = 2 * h0_ + 4 * warp + rest / 16 % 4;
      } else {
        int const channels = f_.vector();
        ow = 2 * w0_ + i0;
        c = cls_ * class_channels(f_.element) + warp * channels + rest / 4 % channels;
        oh = 2 * h0_ + 4 * (rest % 4) + rest / 4 / channels;
      }
      if (c >= p_.out_channels) continue;
      int const address = swizzled(index * f_.element / 16 * 16, width) + index * f_.element % 16;
      ASSERT_EQ(unit.at(address / f_.element), gather(p_, c, 2 * d + group, oh, ow))
          << "channel " << c << " od " << 2 * d + group << " oh " << oh << " ow " << ow;
    }
  }

  Problem p_;
  Form f_;
  bool first_;  // the weights are A
  Slab slab_;
  int cls_, h0_, w0_;
};

struct TileCase {
  char const* name;
  Problem problem;
};

TEST(Sm90Tile, EqualsTheDefinition) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16}) {
    for (bool last : {false, true}) {
      auto ieee = [](Problem p) {
        p.precision = CONVT3D_IEEE;
        return p;
      };
      TileCase const cases[] = {
          {"reference, ieee", ieee(make(1, 32, 64, {3, 16, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last))},
          {"two slabs, k4 and uneven, ieee",
           ieee(make(2, 40, 24, {3, 9, 18}, {4, 3, 4}, {1, 1, 1}, {0, 0, 1}, dtype, last))},
          {"reference", make(1, 32, 64, {3, 16, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last)},
          {"k2, two slabs", make(1, 72, 24, {2, 9, 20}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}, dtype, last)},
          {"k4 and uneven", make(1, 8, 16, {3, 9, 18}, {4, 3, 2}, {1, 2, 0}, {0, 1, 0}, dtype, last)},
          {"k2 3 4, padding 1 0 2", make(1, 40, 16, {4, 9, 18}, {2, 3, 4}, {1, 0, 2}, {1, 0, 1}, dtype, last)},
      };
      for (TileCase const& c : cases) {
        SCOPED_TRACE(std::string(c.name) + (last ? ", NDHWC" : ", NCDHW") +
                     (dtype == CONVT3D_F32 ? ", fp32" : ", fp16"));
        int const cls = class_count(c.problem) - 1;
        for (int group = 0; group < kGroups; ++group) {
          Tile(c.problem, cls, 0, 0).expect_outputs(group, 0);
          Tile(c.problem, 0, 1, 1).expect_outputs(group, 1);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

/// 16-byte accesses are served eight lanes at a time: these must touch all 32 banks.
TEST(Sm90Tile, UnitAccessesDoNotConflict) {
  for (int element : {2, 4}) {
    for (bool last : {false, true}) {
      int const width = last || element == 2 ? 64 : 128;
      for (int lane0 = 0; lane0 < 32; lane0 += 8) {
        for (int chunk = 0; chunk < width / 16; ++chunk) {
          unsigned touched = 0;
          for (int lane = lane0; lane < lane0 + 8; ++lane) {
            int const row = last ? unit_row_ndhwc(lane, 1, 1, 0, 1) : unit_row_ncdhw(element, lane, 1, 0);
            int const at = swizzled(row * width + (last ? lane % 4 : chunk) * 16, width);
            touched |= 1u << (at / 16 % 8);
          }
          EXPECT_EQ(touched, 0xffu) << element << last << ' ' << lane0 << ' ' << chunk;
        }
      }
    }
  }
}

}  // namespace
}  // namespace convt3d::sm90
