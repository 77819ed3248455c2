// SPDX-License-Identifier: Apache-2.0
//
// The streaming kernel's host mathematics: an emulation of one tile on the CPU (shared memory, wgmma's reading of
// swizzled operands, its accumulator layout, the copy engine's boxes) against a gather by the definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reference.hpp"
#include "sm90/stream/choose.hpp"
#include "sm90/stream/plain_map.hpp"
#include "sm90/stream/tile_width.hpp"
#include "sm90_emulation.hpp"
#include "sm90_stream_problem.hpp"

namespace convt3d::sm90::stream {
namespace {

TEST(Sm90Stream, EveryTapIsOnePieceForEachOutputThatItReaches) {
  for (int strides = 0; strides < 64; ++strides) {
    std::vector<int> const stride{1 + strides / 16, 1 + strides / 4 % 4, 1 + strides % 4};
    for (int k = *std::max_element(stride.begin(), stride.end()); k <= kMaxKernel; ++k) {
      for (int padding = 0; padding <= 6; ++padding) {
        Problem const p =
            make(32, 64, {9, 9, 9}, {k, k, k}, {padding, padding, padding}, {0, 0, 0}, CONVT3D_F32, false, stride);
        std::map<int, int> seen;
        for (int cls = 0; cls < class_total(p); ++cls) {
          Program const g = program(p, cls);
          ASSERT_LE(g.pieces(), kMaxPieces);
          ASSERT_GE(g.depth.count, 1);
          for (int i = 0; i < g.depth.count * g.pieces(); ++i) {
            Piece const piece = g.piece(i);
            // Output residue + stride * j and tap meet at input j + delta; along W, j is a pair of outputs.
            int const pair = cls % pairs_w(p);
            int const rest = cls / pairs_w(p);
            int const residue[3] = {rest / stride[1], rest % stride[1], 2 * pair + piece.parity_w};
            if (residue[2] >= output_step(p)) continue;  // computed, but not stored
            int const step[3] = {stride[0], stride[1], output_step(p)};
            int tap = 0;
            for (int axis = 0; axis < 3; ++axis) {
              int const t = piece.tap[axis];
              ASSERT_GE(t, 0);
              ASSERT_LT(t, k);
              int const columns = axis == 2 ? column_step(p) : 1;
              int const j = 7;
              ASSERT_EQ(residue[axis] + step[axis] * j + padding - t, stride[axis] * (columns * j + piece.delta[axis]));
              tap = tap * k + t;
            }
            ++seen[tap];
          }
        }
        EXPECT_EQ(static_cast<int>(seen.size()), k * k * k);
        // At stride 1 along W, both outputs of a pair take every tap.
        for (auto const& [tap, count] : seen) EXPECT_EQ(count, column_step(p)) << tap;
        if (stride[2] != 3) {
          EXPECT_EQ(tile_pieces(p), k * k * k * slab_count(p) * column_step(p));
        }
      }
    }
  }
}

TEST(Sm90Stream, ClassesWithMoreProductsComeFirst) {
  for (int padding : {0, 1, 2}) {
    for (int k = 3; k <= kMaxKernel; ++k) {
      Problem const p = make(32, 64, {9, 9, 9}, {k, k, 3}, {padding, padding, 1}, {0, 0, 0}, CONVT3D_F32, false,
                             {2, 2, k == 5 ? 3 : 2});
      ClassOrder const order = class_order(p);
      std::vector<int> sorted(order.cls, order.cls + class_total(p));
      for (size_t rank = 1; rank < sorted.size(); ++rank) {
        EXPECT_GE(class_pieces(p, sorted[rank - 1]), class_pieces(p, sorted[rank]));
      }
      std::sort(sorted.begin(), sorted.end());
      for (int cls = 0; cls < class_total(p); ++cls) EXPECT_EQ(sorted[cls], cls);
    }
  }
}

TEST(Sm90Stream, PlanesFollowEachOtherAndThePiecesOfAWParity) {
  for (int k = 2; k <= kMaxKernel; ++k) {
    for (auto [dtype, precision] :
         {std::pair{CONVT3D_F32, CONVT3D_TF32}, {CONVT3D_F32, CONVT3D_IEEE}, {CONVT3D_F16, CONVT3D_TF32}}) {
      Problem p = make(320, 64, {9, 9, 9}, {k, k, k}, {k / 3, k / 3, k / 3}, {0, 0, 0}, dtype, true);
      p.precision = precision;
      bool const apart = !uses_split(p);
      EXPECT_EQ(reads_x_in_place(p), !uses_split(p));
      for (int cls = 0; cls < class_total(p); ++cls) {
        Program const g = program(p, cls);
        EXPECT_EQ(g.parities_apart, apart);
        int index = 0;
        for (int plane = 0; plane < slab_count(p) * g.depth.count; ++plane) {
          // As the kernels go through them: where the pieces of a plane lie, the first parity first (or row by row).
          std::vector<int> order(g.pieces());
          int const of_first = apart ? g.height.count * g.width[0].count : g.pieces();
          for (int i = 0; i < g.pieces(); ++i) order[i] = i;
          if (apart && Program::first_parity(plane) == 1) {
            std::rotate(order.begin(), order.begin() + of_first, order.end());
          }
          for (int i = 0; i < g.pieces(); ++i, ++index) {
            Piece const piece = g.piece(index);
            Piece const place = g.place(order[i]);
            EXPECT_EQ(piece.slab, plane / g.depth.count);
            EXPECT_EQ(piece.delta[0], g.depth.lo + plane % g.depth.count);
            EXPECT_EQ(piece.delta[1], place.delta[1]);
            EXPECT_EQ(piece.delta[2], place.delta[2]);
            EXPECT_EQ(piece.parity_w, place.parity_w);
            if (!apart) continue;
            EXPECT_EQ(piece.parity_w, order[i] >= of_first);
            // A parity ends a plane and begins the next one.
            if (i == 0 && plane > 0) {
              EXPECT_EQ(piece.parity_w, g.piece(index - 1).parity_w);
            }
          }
        }
        EXPECT_EQ(index, class_pieces(p, cls));
      }
    }
  }
}

TEST(Sm90Stream, TheFirstPiecesOfATileAreAsManyAsOneSumMayTake) {
  for (int strides = 0; strides < 27; ++strides) {
    std::vector<int> const stride{1 + strides / 9, 1 + strides / 3 % 3, 1 + strides % 3};
    for (int k = *std::max_element(stride.begin(), stride.end()); k <= kMaxKernel; ++k) {
      for (auto [dtype, most] : {std::pair{CONVT3D_F32, 4}, {CONVT3D_F16, 4}, {CONVT3D_BF16, 8}}) {
        for (int channels : {8, 64, 136, 1024}) {
          Problem p = make(channels, 64, {9, 9, 9}, {k, k, k}, {1, 1, 1}, {0, 0, 0}, dtype, false, stride);
          p.precision = CONVT3D_TF32;
          // 128 products in tf32 mode, 256 of fp16, 512 of bf16.
          EXPECT_EQ(most * kSlabRowBytes / element_bytes(p), dtype == CONVT3D_F32   ? 128
                                                             : dtype == CONVT3D_F16 ? 256
                                                                                    : 512);
          for (int cls = 0; cls < class_total(p); ++cls) {
            Program const g = program(p, cls);
            int const direct = direct_pieces(p, cls);
            int const all = class_pieces(p, cls);
            int taken[2] = {0, 0};
            for (int i = 0; i < direct; ++i) ++taken[g.piece(i).parity_w];
            EXPECT_LE(std::max(taken[0], taken[1]), most);
            ASSERT_LE(direct, all);
            if (direct < all) {
              EXPECT_EQ(taken[g.piece(direct).parity_w], most);
            }
          }
        }
      }
    }
  }
}

TEST(Sm90Stream, RowsAreEveryChannelOnce) {
  for (bool pairs : {false, true}) {
    std::vector<int> seen(kTileChannels);
    for (int row = 0; row < kTileChannels; ++row) ++seen.at(row_channel(pairs, row));
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kTileChannels);
  }
}

/// Where a unit of a tile lies (StreamEpilogue::unit_box and place).
UnitPlace unit_place(Problem const& p, int cls, int channel, int d, int h, int w, int n, int group, int warp, int sub) {
  bool const last = form(p).channels_last;
  int const units = units_per_warp(element_bytes(p));
  int const pair = cls % pairs_w(p);
  int const rest = cls / pairs_w(p);
  int const stride_h = static_cast<int>(p.stride[1]);
  return {channel + warp * 16 + (last ? 0 : sub * (16 / units)),
          w * 2 * kTileW + (last ? sub * (2 * kTileW / units) : 0),
          h * kTileH,
          static_cast<int>(p.stride[0]) * (d + group) + rest / stride_h,
          n,
          rest % stride_h,
          pair};
}

/// Calls move(offset in y in elements, byte of the unit) for everything that a plain store of a unit moves.
template <int kElement, bool kLast, int kBytes, class Move>
void for_each_move(Problem const& p, UnitPlace const& u, Move&& move) {
  using Map = PlainMap<kElement, kLast, kBytes>;
  PlainExtent const extent = plain_extent(p);
  static std::vector<char> memory(1 << 24);  // never touched: addresses are compared with its start
  char* const base = memory.data();
  for (int lane = 0; lane < 32; ++lane) {
    PlainWalk const w = plain_walk<kElement, kLast, kBytes>(extent, u, base, p.y_stride, lane);
    for_each_line<Map>(w, 0, lane, [&](auto which, char* at, int rows, uint32_t shared) {
      for (int i = 0; i < Map::kAccesses; ++i) {
        for (int e = 0; Map::row(i) < rows && e < (w.both ? Map::kElements : 1); ++e) {
          move((at - base) / kElement + e,
               static_cast<int>(shared ^ Map::inverted(which, i)) + Map::common_bytes(which, i) + e * kElement);
        }
        at += (Map::row(i + 1) - Map::row(i)) * w.row;
      }
    });
  }
}

template <int kElement, bool kLast, int kBytes>
void expect_each_output_once(Problem const& p) {
  std::vector<int> moved(static_cast<size_t>(test::span_of(y_shape(p), p.y_stride)));
  Tiling const t = tiling(p);
  for (int n = 0; n < p.batch; ++n) {
    for (int cls = 0; cls < class_total(p); ++cls) {
      for (int unit = 0; unit < kGroups * 4 * units_per_warp(kElement); ++unit) {
        for (int tile = 0; tile < t.tiles[0] * t.tiles[1] * t.tiles[2] * channel_tiles(p); ++tile) {
          int const w = tile % t.tiles[2];
          int const h = tile / t.tiles[2] % t.tiles[1];
          int const d = tile / t.tiles[2] / t.tiles[1] % t.tiles[0] * kGroups;
          int const channel = tile / t.tiles[2] / t.tiles[1] / t.tiles[0] * kTileChannels;
          UnitPlace const u = unit_place(p, cls, channel, d, h, w, n, unit / 4 / units_per_warp(kElement), unit % 4,
                                         unit / 4 % units_per_warp(kElement));
          if (u.d >= output_size(p)[0] || u.c >= p.out_channels) continue;  // not moved
          for_each_move<kElement, kLast, kBytes>(p, u, [&](int64_t at, int) { ++moved.at(at); });
        }
      }
    }
  }
  test::for_each_index(y_shape(p), [&](int64_t const* index) { --moved.at(test::offset_of(index, p.y_stride)); });
  EXPECT_EQ(std::count(moved.begin(), moved.end(), 0), static_cast<int64_t>(moved.size()));
}

// The words of a row of 16-bit elements that starts anywhere: lane l's holds elements 2 l and 2 l + 1, of an odd row 2
// l - 1 and 2 l, and never one past the row's end.
TEST(Sm90Stream, WordsOfARow) {
  using Map = PlainMap<2, false, 4>;
  for (int width = 1; width <= 32; ++width) {
    for (bool odd : {false, true}) {
      std::vector<int> loaded(static_cast<size_t>(width) + 1);  // of an odd row, the element before it first
      for (int lane = 0; lane < Map::kRowLanes; ++lane) {
        int const first = Map::element(lane) - odd;
        int const bytes = row_word_bytes(width - Map::element(lane), odd);
        ASSERT_TRUE(bytes == 0 || bytes == 2 || bytes == 4);
        for (int i = 0; i < bytes / 2; ++i) ++loaded.at(static_cast<size_t>(first + i + 1));
      }
      for (int e = 0; e < width; ++e) {
        EXPECT_EQ(loaded[static_cast<size_t>(e) + 1], odd && e == 31 ? 0 : 1) << width << ' ' << odd << ' ' << e;
      }
    }
  }
}

TEST(Sm90Stream, PlainAccessesMoveEveryOutputOnce) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16}) {
    for (bool last : {false, true}) {
      Problem const cases[] = {
          make(8, 70, {2, 9, 18}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, dtype, last),
          make(8, 13, {3, 10, 17}, {2, 2, 3}, {0, 0, 1}, {0, 1, 1}, dtype, last),
          make(8, 1, {2, 3, 33}, {3, 3, 3}, {1, 1, 1}, {0, 1, 0}, dtype, last),
          make(8, 20, {2, 9, 18}, {2, 4, 5}, {0, 1, 2}, {0, 0, 1}, dtype, last, {2, 4, 4}),
          make(8, 17, {3, 9, 12}, {3, 3, 3}, {0, 0, 1}, {0, 0, 0}, dtype, last, {1, 3, 3}),
          make(8, 24, {2, 9, 17}, {2, 4, 3}, {0, 0, 1}, {0, 0, 0}, dtype, last, {2, 4, 2}),
          make(8, 9, {3, 17, 35}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, dtype, last, {1, 1, 1}),
      };
      for (Problem p : cases) {
        for (bool slice : {false, true}) {
          if (slice) {  // of a larger buffer
            for (int axis = 0; axis < 5; ++axis) p.y_stride[axis] = p.y_stride[axis] * 2 + (axis == 0 ? 5 : 0);
          }
          SCOPED_TRACE(std::string(last ? "NDHWC" : "NCDHW") +
                       (dtype == CONVT3D_F32 ? " fp32, Cout " : " fp16, Cout ") + std::to_string(p.out_channels) +
                       (slice ? " slice" : ""));
          if (form(p).channels_last != last && p.out_channels > 1 && !slice) FAIL() << "the format changed";
          bool const as_last = form(p).channels_last;
          if (dtype == CONVT3D_F32) {
            as_last ? expect_each_output_once<4, true, 4>(p) : expect_each_output_once<4, false, 4>(p);
          } else {
            as_last ? expect_each_output_once<2, true, 2>(p) : expect_each_output_once<2, false, 2>(p);
            if (slice) continue;  // pairs of elements are neighbours
            as_last ? expect_each_output_once<2, true, 4>(p) : expect_each_output_once<2, false, 4>(p);
          }
        }
      }
    }
  }
}

/// One consumer group's part of a tile, in exact integers.
class Tile {
 public:
  Tile(Problem const& p, int channel_tile, int d, int h, int w)
      : p_(p),
        f_(form(p)),
        width_(tile_width(p)),
        slab_(slab(p)),
        channel_(channel_tile * kTileChannels),
        d_(d),
        h_(h),
        w_(w) {}

  void expect_outputs(int cls, int group) const {
    Program const g = program(p_, cls);
    int const per_slab = 128 / f_.element;
    Sums sum(2, std::vector<std::vector<int>>(kTileChannels, std::vector<int>(8 * width_)));
    for (int i = 0; i < class_pieces(p_, cls); ++i) {
      Piece const piece = g.piece(i);
      std::vector<int> const stage = make_slab(d_ + group + piece.delta[0], piece.slab * per_slab);
      int const view =
          operand_offset(slab_.pitch, piece.delta[1] - rows_window(p_).lo, piece.delta[2] - columns_window(p_).lo) * 16;
      multiply(stage, make_piece(piece, piece.slab * per_slab), view, sum[piece.parity_w]);
    }
    for (int warp = 0; warp < 4; ++warp) {
      for (int sub = 0; sub < units_per_warp(f_.element); ++sub) expect_unit(sum, cls, group, warp, sub);
    }
  }

 private:
  using Sums = std::vector<std::vector<std::vector<int>>>;

  std::vector<int> make_slab(int d, int first) const {
    std::vector<int> stage(slab_.bytes / f_.element);
    Window const wh = rows_window(p_);
    Window const ww = columns_window(p_);
    for (int i = 0; i < slab_.pitch; ++i) {
      for (int j = 0; j < slab_.columns; ++j) {
        int const h = h_ * kTileH + wh.lo + i;
        int const w = w_ * width_ * column_step(p_) + ww.lo + j;
        bool const inside = d >= 0 && d < p_.in_size[0] && h >= 0 && h < p_.in_size[1] && w >= 0 && w < p_.in_size[2];
        for (int c = 0; inside && c < 128 / f_.element && first + c < p_.in_channels; ++c) {
          int const at = slab_offset(j * slab_.pitch + i, c / f_.vector()) + c % f_.vector() * f_.element;
          stage.at(at / f_.element) = x_value(first + c, d, h, w);
        }
      }
    }
    return stage;
  }

  std::vector<int> make_piece(Piece const& piece, int first) const {
    std::vector<int> image(kPieceBytes / f_.element);
    for (int row = 0; row < kTileChannels; ++row) {
      int const o = channel_ + row_channel(pairs_channels(f_.channels_last, f_.element), row);
      for (int k = 0; k < 128 / f_.element && o < p_.out_channels && first + k < p_.in_channels; ++k) {
        image.at(piece_offset(row, k * f_.element) / f_.element) =
            weight_value(first + k, o, piece.tap[0], piece.tap[1], piece.tap[2]);
      }
    }
    return image;
  }

  void multiply(std::vector<int> const& stage, std::vector<int> const& image, int view,
                std::vector<std::vector<int>>& sum) const {
    for (int row = 0; row < kTileChannels; ++row) {
      for (int k = 0; k < 128; k += f_.element) {
        int const value = image.at(swizzled(row * 128 + k, 128) / f_.element);
        for (int n = 0; n < 8 * width_ && value != 0; ++n) {
          int const at = view + n / 8 * slab_.pitch * column_step(p_) * 128 + n % 8 * 128;
          sum[row][n] += value * stage.at(swizzled(at + k, 128) / f_.element);
        }
      }
    }
  }

  void expect_unit(Sums const& sum, int cls, int group, int warp, int sub) const {
    constexpr int kUnset = -1000000;
    bool const last = f_.channels_last;
    int const units = units_per_warp(f_.element);
    int const width = last ? 16 * f_.element : 32 * f_.element;
    int const outputs_w = last ? 2 * width_ / units : 2 * width_;
    int const channels = last ? 16 : 16 / units;
    std::vector<int> unit(kUnitBytes / f_.element, kUnset);
    for (int lane = 0; lane < 32; ++lane) {
      for (int parity = 0; parity < 2; ++parity) {
        for (int i = 0; i < 4 * width_; ++i) {
          // Register i: row lane / 4 + 8 half of the warp's 16, column 8 j + 2 (lane % 4) + b.
          int const j = i / 4, half = i / 2 % 2, b = i % 2;
          int const value = sum[parity][warp * 16 + lane / 4 + 8 * half][8 * j + lane % 4 * 2 + b];
          int ow = 2 * j + parity;
          int byte = 0, row = 0;
          if (last) {
            if (ow / outputs_w != sub) continue;
            ow -= sub * outputs_w;
            row = unit_row_ndhwc(lane, ow, b);
            byte = row_channel(pairs_channels(last, f_.element), 8 * half + lane / 4) * f_.element;
          } else {
            if (units == 2 && half != sub) continue;
            row = unit_row_ncdhw(f_.element, lane, half, b);
            byte = ow * f_.element;
          }
          int const at = swizzled(row * width + byte, width) / f_.element;
          ASSERT_EQ(unit.at(at), kUnset) << "written twice";
          unit.at(at) = value;
        }
      }
    }
    if (width_ == kTileW) {
      expect_plain<4>(unit, cls, group, warp, sub);
      if (f_.element == 2) expect_plain<2>(unit, cls, group, warp, sub);
    }
    if (!tiles_are_boxes(p_)) return;
    // The boxes, innermost first: NCDHW (W, H / (2 stride), C) for each b, NDHWC (C, H / stride, W).
    int const inner = width / f_.element;
    int const stride_h = static_cast<int>(p_.stride[1]);
    for (int index = 0; index < kUnitBytes / f_.element; ++index) {
      int const rest = index / inner;
      int c, oh, ow;
      if (last) {
        c = index % inner;
        oh = stride_h * (rest % 8) + cls % stride_h;
        if (rest / 8 >= outputs_w) break;
        ow = sub * outputs_w + rest / 8;
      } else {
        ow = index % inner;  // a box of narrow rows leaves the end of each alone
        if (ow >= outputs_w) continue;
        c = sub * channels + rest / 4 % channels;
        oh = stride_h * (2 * (rest % 4) + rest / 4 / channels) + cls % stride_h;
      }
      c += channel_ + warp * 16;
      if (c >= p_.out_channels) continue;
      oh += h_ * stride_h * kTileH;
      ow += w_ * 2 * width_;
      int const od = static_cast<int>(p_.stride[0]) * (d_ + group) + cls / stride_h;
      ASSERT_EQ(unit.at(swizzled(index * f_.element, width) / f_.element), gather(p_, c, od, oh, ow))
          << "channel " << c << " od " << od << " oh " << oh << " ow " << ow;
    }
  }

  template <int kBytes>
  void expect_plain(std::vector<int> const& unit, int cls, int group, int warp, int sub) const {
    if (f_.element == 4) {
      f_.channels_last ? expect_moves<4, true, 4>(unit, cls, group, warp, sub)
                       : expect_moves<4, false, 4>(unit, cls, group, warp, sub);
    } else {
      f_.channels_last ? expect_moves<2, true, kBytes>(unit, cls, group, warp, sub)
                       : expect_moves<2, false, kBytes>(unit, cls, group, warp, sub);
    }
  }

  /// Every access of a plain store finds its output in the unit.
  template <int kElement, bool kLast, int kBytes>
  void expect_moves(std::vector<int> const& unit, int cls, int group, int warp, int sub) const {
    UnitPlace const u = unit_place(p_, cls, channel_, d_, h_, w_, 0, group, warp, sub);
    Size3 const out = output_size(p_);
    if (u.d >= out[0] || u.c >= p_.out_channels) return;
    for_each_move<kElement, kLast, kBytes>(p_, u, [&](int64_t at, int byte) {
      int64_t index[5] = {};
      for (int i = 0; i < 5; ++i) {  // y is packed
        int const axis = kLast ? std::array{0, 2, 3, 4, 1}[i] : i;
        index[axis] = at / p_.y_stride[axis];
        at %= p_.y_stride[axis];
      }
      EXPECT_EQ(unit.at(byte / kElement), gather(p_, static_cast<int>(index[1]), static_cast<int>(index[2]),
                                                 static_cast<int>(index[3]), static_cast<int>(index[4])))
          << "channel " << index[1] << " od " << index[2] << " oh " << index[3] << " ow " << index[4];
    });
  }

  Problem p_;
  Form f_;
  int width_;
  Slab slab_;
  int channel_, d_, h_, w_;
};

TEST(Sm90Stream, ATileEqualsTheDefinition) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16}) {
    for (bool last : {false, true}) {
      Problem const cases[] = {
          make(40, 72, {3, 9, 18}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last),
          make(8, 16, {2, 9, 20}, {2, 4, 5}, {0, 1, 2}, {0, 0, 0}, dtype, last),
          make(72, 24, {4, 9, 18}, {4, 2, 3}, {3, 1, 0}, {1, 0, 0}, dtype, last),
          make(40, 48, {3, 9, 34}, {3, 3, 1}, {1, 1, 0}, {1, 1, 0}, dtype, last, {2, 2, 1}),
          make(8, 16, {3, 9, 18}, {1, 2, 2}, {0, 0, 0}, {0, 0, 0}, dtype, last, {1, 2, 2}),
          make(8, 16, {3, 17, 36}, {3, 4, 3}, {1, 2, 1}, {0, 0, 0}, dtype, last, {2, 1, 1}),
          make(8, 20, {3, 9, 18}, {2, 4, 5}, {0, 1, 2}, {0, 0, 1}, dtype, last, {2, 4, 4}),
          make(8, 70, {3, 9, 18}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, dtype, last),
          make(8, 13, {3, 10, 17}, {2, 2, 3}, {0, 0, 1}, {0, 1, 1}, dtype, last),
          make(8, 24, {3, 9, 17}, {2, 4, 3}, {0, 0, 1}, {0, 0, 0}, dtype, last, {2, 4, 2}),
          make(8, 16, {3, 9, 18}, {3, 3, 3}, {0, 0, 1}, {0, 0, 0}, dtype, last, {1, 3, 3}),
          make(24, 72, {3, 9, 30}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last),
          make(8, 16, {3, 9, 32}, {3, 4, 2}, {1, 1, 0}, {1, 0, 0}, dtype, last),
          make(8, 16, {3, 9, 24}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last),
          make(8, 16, {3, 9, 20}, {2, 4, 4}, {0, 1, 1}, {0, 0, 0}, dtype, last),
          make(24, 48, {3, 9, 24}, {3, 3, 3}, {1, 1, 1}, {1, 1, 0}, dtype, last, {2, 2, 1}),
      };
      std::map<int, int> widths;
      for (Problem const& p : cases) {
        ++widths[tile_width(p)];
        SCOPED_TRACE(std::string(last ? "NDHWC" : "NCDHW") + (dtype == CONVT3D_F32 ? " fp32, Cin " : " fp16, Cin ") +
                     std::to_string(p.in_channels));
        for (int cls = 0; cls < class_total(p); ++cls) {
          Tile(p, channel_tiles(p) - 1, 0, 0, 0).expect_outputs(cls, cls % 2);
          Tile(p, 0, 2, 1, 1).expect_outputs(cls, 1 - cls % 2);
          if (HasFatalFailure()) return;
        }
      }
      EXPECT_GE(widths[kTileW], 3);
      EXPECT_GE(widths[kNarrowTileW], 3);
    }
  }
}

}  // namespace
}  // namespace convt3d::sm90::stream
