// SPDX-License-Identifier: Apache-2.0
//
// The patch-expansion kernel's index maps: an instruction's rows and columns as its threads hold them, against the
// product that they stand for; and what it takes, and how it may access add and y.
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "cases.hpp"
#include "sm80/patch/choice.hpp"

namespace convt3d::sm80::patch {
namespace {

using test::Layout;

// Where the instructions have their operands and results, by the PTX manual: of a 16 x 8 product, a lane has two
// columns of rows lane / 4 and lane / 4 + 8, and `kSlots` of the channels of its quad position, in both operands.
constexpr int kRows = 16;

template <class F>
void check_form() {
  constexpr int kSteps = 4, kChannels = kSteps * F::kStepChannels;
  // Of a lane's 16 bytes of weights, the registers are (row, first half of its slots), (row + 8, first), (row, second),
  // (row + 8, second).
  constexpr int kOfRegister = F::kSlots / 2;
  std::set<int> slots;
  for (int element = 0; element < 2; ++element) {
    for (int slot = 0; slot < F::kSlots; ++slot) {
      int const at = F::weight_slot(element, slot);
      slots.insert(at);
      int const word = at / kOfRegister;
      EXPECT_EQ(word % 2, element);
      EXPECT_EQ(word / 2 * kOfRegister + at % kOfRegister, slot);
    }
  }
  EXPECT_EQ(slots.size(), static_cast<size_t>(F::kVector));
  // All channels once, and the slots of two steps are neighbours.
  std::set<int> channels;
  for (int step = 0; step < kSteps; ++step) {
    for (int quad = 0; quad < 4; ++quad) {
      for (int slot = 0; slot < F::kSlots; ++slot) {
        int const channel = F::channel(step, quad, slot);
        channels.insert(channel);
        EXPECT_EQ(channel, F::channel(step / 2 * 2, quad, 0) + step % 2 * F::kSlots + slot);
      }
    }
  }
  EXPECT_EQ(channels.size(), static_cast<size_t>(kChannels));
  EXPECT_EQ(*channels.rbegin(), kChannels - 1);
  // Results: the element and the position that a register has by the instruction are those of its vector.
  std::set<std::array<int, 4>> registers;
  std::set<int> positions;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int v = 0; v < F::kVectors; ++v) {
      for (int i = 0; i < F::kVector; ++i) {
        typename F::Register const r = F::result(v, i);
        registers.insert({lane, r.row_block, r.column_block, r.index});
        int const row = lane / 4 + (r.index / 2) * kRows / 2, column = lane % 4 * 2 + r.index % 2;
        EXPECT_EQ(row % kGroupUnits, lane / 4);
        EXPECT_EQ(2 * r.row_block + row / kGroupUnits, i % F::kUnit);
        int const position = F::position(r.column_block, column);
        EXPECT_EQ(position, F::first_position(lane % 4) + F::kVectorStep * v + i / F::kUnit);
        positions.insert(position);
      }
    }
  }
  EXPECT_EQ(registers.size(), static_cast<size_t>(kLanes * F::kRowBlocks * F::kColumnBlocks * 4));
  EXPECT_EQ(positions.size(), static_cast<size_t>(F::kRunPositions));
  EXPECT_EQ(*positions.rbegin(), F::kRunPositions - 1);
}

TEST(PatchForms, ProductsAndPlaces) {
  check_form<Form<4, 2>>();
  check_form<Form<4, 4>>();
  check_form<Form<2, 2>>();
  check_form<Form<2, 4>>();
  check_form<Form<2, 8>>();
}

Problem expansion(int64_t in, int64_t out, std::array<int64_t, 3> const& step, std::array<int64_t, 3> const& size,
                  Layout layout, int32_t dtype = CONVT3D_F32) {
  Problem p = test::cubic_problem(2, in, out, 1, 1, 1, 0, 0, layout);
  for (size_t axis = 0; axis < 3; ++axis) {
    p.kernel[axis] = p.stride[axis] = step[axis];
    p.in_size[axis] = size[axis];
  }
  p.dtype = dtype;
  p.precision = CONVT3D_TF32;
  test::pack(p, layout);
  return p;
}

/// Offsets of the first elements of all accesses of a unit at a position are multiples of its bytes.
void check_access(Problem const& p) {
  int const bytes = element_bytes(p), unit = unit_elements(p), vector = kAccessBytes / bytes;
  Size5 const stride = effective_stride(y_shape(p), p.y_stride);
  Access const how = access(p, stride, p.y_alignment);
  if (how != Access::kVectors) return;
  EXPECT_EQ(p.y_alignment, 16);
  int64_t const along = channels_last(p) ? 1 : vector / unit;  // positions of a vector
  EXPECT_EQ(p.in_size[2] % along, 0) << test::describe(p);
  for (int axis : {0, 2, 3}) {
    EXPECT_EQ(stride[axis] * bytes % 16, 0) << test::describe(p);  // 0 where there is one
  }
  EXPECT_EQ(stride[4] * p.stride[2] * along * bytes % 16, 0) << test::describe(p);
  EXPECT_EQ(channels_last(p) ? units(p).run % unit : p.stride[2] - unit, 0) << test::describe(p);
}

TEST(PatchAccess, IsAligned) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    for (int32_t dtype : {CONVT3D_F32, CONVT3D_F16}) {
      for (int64_t out : {1, 2, 8, 14, 16, 17}) {
        for (int64_t width = 1; width <= 9; ++width) {
          for (int64_t step = 1; step <= 4; ++step) {
            for (int32_t alignment : {4, 8, 16}) {
              Problem p = expansion(24, out, {2, step, step}, {3, 2, width}, layout, dtype);
              p.y_alignment = alignment;
              check_access(p);
              p.has_add = 1;
              check_access(p);
            }
          }
        }
      }
    }
  }
}

TEST(PatchAccess, ByRowAndLayout) {
  auto const of = [](Problem const& p) { return access(p, effective_stride(y_shape(p), p.y_stride), p.y_alignment); };
  EXPECT_EQ(of(expansion(32, 16, {2, 4, 4}, {4, 4, 5}, Layout::kNcdhw)), Access::kVectors);
  EXPECT_EQ(of(expansion(32, 16, {2, 4, 4}, {4, 4, 5}, Layout::kNcdhw, CONVT3D_F16)), Access::kUnits);
  EXPECT_EQ(of(expansion(32, 16, {2, 4, 4}, {4, 4, 6}, Layout::kNcdhw, CONVT3D_F16)), Access::kVectors);
  EXPECT_EQ(of(expansion(32, 16, {2, 2, 2}, {4, 4, 5}, Layout::kNcdhw)), Access::kUnits);
  EXPECT_EQ(of(expansion(32, 16, {2, 3, 3}, {4, 4, 4}, Layout::kNcdhw)), Access::kElements);
  // All taps along W and their channels are 224 bytes, though those of a voxel are 56.
  Problem p = expansion(32, 14, {2, 4, 4}, {4, 4, 5}, Layout::kNdhwc);
  EXPECT_TRUE(is_joined(p));
  EXPECT_EQ(of(p), Access::kVectors);
  EXPECT_EQ(units(p).count, 2 * 4 * 14);
  p.has_add = 1;
  for (int64_t& stride : p.add_stride) stride = 0;
  EXPECT_FALSE(is_joined(p));
  EXPECT_EQ(units(p).count, 2 * 4 * 4 * 4);
}

TEST(PatchTakes, KernelEqualToStride) {
  Problem const good = expansion(32, 16, {2, 4, 4}, {32, 32, 32}, Layout::kNcdhw);
  EXPECT_TRUE(takes(good, 80));
  auto const takes_changed = [&](auto change) {
    Problem p = good;
    change(p);
    return takes(p, 80);
  };
  EXPECT_FALSE(takes_changed([](Problem& p) { p.kernel[1] = 3; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.padding[0] = 1; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.output_padding[2] = 1; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.dilation[2] = 2; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.groups = 2; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.in_channels = 193; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.in_channels = 65, p.precision = CONVT3D_IEEE; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.kernel[2] = p.stride[2] = 5; }));
  EXPECT_FALSE(takes_changed([](Problem& p) { p.out_channels = 4096; })) << "its weights do not fit";
  EXPECT_FALSE(takes_changed([](Problem& p) { p.batch = int64_t{1} << 40; }));
}

TEST(PatchTakes, WeightsBySharedMemory) {
  Problem const p = expansion(128, 64, {2, 2, 2}, {64, 64, 64}, Layout::kNcdhw);
  EXPECT_EQ(splits(p, 90), 2);
  EXPECT_EQ(splits(p, 80), 3);
  EXPECT_EQ(splits(p, 86), 8);
  EXPECT_TRUE(takes(p, 86));
  EXPECT_FALSE(takes(expansion(128, 72, {2, 2, 2}, {64, 64, 64}, Layout::kNcdhw), 86));
  for (int capability : {80, 86, 90, 120}) {
    int64_t const held = split_groups(p, capability) * group_bytes(p);
    EXPECT_LE(held + kStages * stage_bytes(kMostThreads), shared_limit(capability));
    EXPECT_GE(splits(p, capability) * split_groups(p, capability), group_count(p));
    EXPECT_LT((splits(p, capability) - 1) * split_groups(p, capability), group_count(p)) << "no split without a group";
  }
}

TEST(PatchChoice, ByMeasurement) {
  Problem const unetr = expansion(32, 16, {2, 4, 4}, {32, 32, 32}, Layout::kNcdhw);
  EXPECT_TRUE(chosen(unetr, 80));
  EXPECT_TRUE(faster_than_sm90(unetr));
  Problem p = unetr;
  p.has_add = 1;
  EXPECT_TRUE(faster_than_sm90(p));
  p.add_stride[4] = 0;  // one by one
  EXPECT_FALSE(chosen(p, 80));
  Problem const odd = expansion(64, 32, {2, 2, 2}, {47, 47, 47}, Layout::kNcdhw);
  EXPECT_TRUE(takes(odd, 90));
  EXPECT_FALSE(chosen(odd, 90));
  wherever_possible = true;
  EXPECT_TRUE(chosen(odd, 90));
  wherever_possible = false;
  Problem const wide = expansion(128, 64, {2, 2, 2}, {64, 64, 64}, Layout::kNcdhw);
  EXPECT_TRUE(chosen(wide, 90));
  EXPECT_FALSE(faster_than_sm90(wide));
  Problem halves = expansion(64, 32, {2, 2, 2}, {64, 64, 64}, Layout::kNcdhw);
  EXPECT_TRUE(faster_than_sm90(halves));
  halves.activation = CONVT3D_ACT_GELU;
  EXPECT_FALSE(faster_than_sm90(halves));
  EXPECT_FALSE(faster_than_sm90(expansion(64, 32, {2, 2, 2}, {64, 64, 64}, Layout::kNdhwc)));
  EXPECT_FALSE(faster_than_sm90(expansion(64, 32, {2, 2, 2}, {64, 64, 64}, Layout::kNcdhw, CONVT3D_F16)));
  EXPECT_TRUE(faster_than_sm90(expansion(32, 3, {2, 2, 2}, {64, 64, 64}, Layout::kNdhwc, CONVT3D_F16)));
}

}  // namespace
}  // namespace convt3d::sm80::patch
