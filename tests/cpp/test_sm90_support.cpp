// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family's choices: configuration, workspace, what it takes, and which of its kernels runs.
#include <gtest/gtest.h>

#include "cases.hpp"
#include "sm90/stream/rows.hpp"
#include "sm90_problems.hpp"

namespace convt3d::sm90 {
namespace {

// ---- configuration ---------------------------------------------------------------------------------------------

TEST(Sm90Config, FitsIntoSharedMemory) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
    for (bool last : {false, true}) {
      for (int in : {8, 16, 32, 64, 128, 256}) {
        for (int k : {2, 3, 4}) {
          Problem const p =
              make(2, in, 64, {8, 16, 16}, {k, k, k}, {k / 3, k / 3, k / 3}, {k % 2, k % 2, k % 2}, dtype, last);
          Config const c = choose_config(p);
          if (!refusal(p).empty() || choose_mainloop(p, 132) != Mainloop::kResident) continue;
          EXPECT_LE(shared_bytes(p, c.stages, c.ring), kSharedLimit);
          EXPECT_GE(c.ring, kSmallestRing);
          EXPECT_LE(c.ring, kLargestRing);
          EXPECT_GE(c.stages, c.keep ? window(p.kernel[0], p.padding[0]).count * slab_count(p) : 2);
          EXPECT_LE(c.stages, kLargestStages);
          EXPECT_TRUE(c.run_length == 1 || c.keep);
        }
      }
    }
  }
}

TEST(Sm90Config, TilesCoverTheOutputOnce) {
  Problem const p = make(3, 32, 64, {5, 9, 18}, {3, 3, 3}, {1, 1, 1}, {0, 1, 0});
  for (int length : {1, 2, 4}) {
    Tiling const t = tiling(p, length);
    EXPECT_EQ(t.pairs[0], 5);
    EXPECT_EQ(t.pairs[1], 9);
    EXPECT_EQ(t.pairs[2], 18);
    EXPECT_EQ(t.runs, 3 * ceil_div(5, length) * 2 * 2);
  }
}

TEST(Sm90Config, WorkspacePartsDoNotOverlap) {
  Problem const p = reference();
  Config const c = choose_config(p);
  Workspace const w = workspace_layout(p, c);
  EXPECT_LE(w.counters + class_count(p) * 4, w.suspects);
  EXPECT_LE(w.suspects + kPrepareCtas * 4, w.owners);
  EXPECT_LE(w.owners + class_count(p) * tiling(p, c.run_length).runs * 4, w.weights);
  EXPECT_EQ(w.weights % 128, 0u);
  EXPECT_EQ(w.weights + class_count(p) * class_blocks(p) * kWeightBlockBytes, w.bytes);
}

// ---- what is taken ---------------------------------------------------------------------------------------------

TEST(Sm90Supported, TakesTheReferenceInEveryTypeAndFormat) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
    for (bool last : {false, true}) EXPECT_EQ(refusal(reference(dtype, last)), "");
  }
}

TEST(Sm90Supported, TakesTheReferenceInIeeeMode) {
  for (bool last : {false, true}) {
    Problem p = reference(CONVT3D_F32, last);
    p.precision = CONVT3D_IEEE;
    EXPECT_EQ(refusal(p), "");
    Config const c = choose_config(p);
    EXPECT_LE(shared_bytes(p, c.stages, c.ring), kSharedLimit);
    EXPECT_EQ(c.ring, last ? 12 : 11);
    Workspace const w = workspace_layout(p, c);
    size_t const blocks = static_cast<size_t>(class_count(p) * class_blocks(p));
    EXPECT_EQ(w.weights + static_cast<size_t>(class_count(p) * class_weight_bytes(p)), w.scans);
    EXPECT_LE(w.scans + sizeof(ScanResult) * size_t{kScanCtas}, w.weight_results);
    EXPECT_LE(w.weight_results + blocks * 4, w.weight_exponents);
    EXPECT_LE(w.weight_exponents + static_cast<size_t>(class_count(p)) * 4, w.declined);
    EXPECT_LE(w.declined + 4, w.bytes);
  }
}

TEST(Sm90Supported, TakesWideLayersInIeeeMode) {
  for (bool last : {false, true}) {
    Problem p = make(2, 256, 128, {24, 24, 24}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, CONVT3D_F32, last);
    p.precision = CONVT3D_IEEE;
    EXPECT_EQ(refusal(p), "");
    EXPECT_EQ(choose_mainloop(p, kH200.multiprocessors), Mainloop::kStream);
    stream::Config const c = stream::choose_config(p);
    EXPECT_LE(stream::shared_bytes(p, c), kSharedLimit);
    EXPECT_GE(c.ring, 8);
  }
}

TEST(Sm90Supported, SaysWhatItDoesNotTake) {
  auto with = [](auto change) {
    Problem p = reference();
    change(p);
    return refusal(p);
  };
  EXPECT_EQ(refusal(reference(), {80, 108}), "sm90: compute capability is 80, the kernel takes 90");
  EXPECT_EQ(refusal(reference(), {100, 148}), "sm90: compute capability is 100, the kernel takes 90");
  EXPECT_EQ(with([](Problem& p) { p.groups = 2; }), "sm90: groups is 2, the kernel takes 1");
  EXPECT_EQ(with([](Problem& p) { p.stride[1] = 5; }), "sm90: stride along H is 5, the kernel takes 1 to 4");
  EXPECT_EQ(with([](Problem& p) { p.dilation[0] = 2; }), "sm90: dilation along D is 2, the kernel takes 1");
  EXPECT_EQ(with([](Problem& p) { p.kernel[2] = 6; }),
            "sm90: kernel size along W is 6, the kernel takes the stride to 5");
  EXPECT_EQ(with([](Problem& p) { p.kernel[2] = 1; }),
            "sm90: kernel size along W is 1, the kernel takes the stride to 5");
  EXPECT_EQ(with([](Problem& p) {
              for (int i = 0; i < 3; ++i) p.stride[i] = p.kernel[i] = 4;
            }),
            "sm90: number of classes of outputs is 32, the kernel takes at most 16");
}

// What the resident kernel does not take streams, in ieee mode too.
TEST(Sm90Supported, WhatIsNotForTheResidentKernelStreams) {
  auto streams = [](auto change) {
    for (convt3d_precision precision : {CONVT3D_TF32, CONVT3D_IEEE}) {
      Problem p = reference();
      p.precision = precision;
      change(p);
      EXPECT_EQ(refusal(p), "");
      EXPECT_EQ(choose_mainloop(p, 132), Mainloop::kStream);
    }
  };
  streams([](Problem& p) { p.stride[1] = 3; });
  streams([](Problem& p) { p.in_channels = 12; });
  streams([](Problem& p) { p.out_channels = 20; });
  streams([](Problem& p) { p.y_alignment = 8; });
  streams([](Problem& p) { p.add_alignment = 4; });
  streams([](Problem& p) { p.y_stride[3] = 33; });
  streams([](Problem& p) { p.add_stride[1] = 0; });
  streams([](Problem& p) { p.x_stride[4] = 2; });
}

TEST(Sm90Choice, WeightsThatDoNotFitStream) {
  auto choice = [](Problem const& p) { return choose_mainloop(p, kH200.multiprocessors); };
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
    for (bool last : {false, true}) {
      EXPECT_EQ(choice(reference(dtype, last)), Mainloop::kResident);
      Problem const wide = make(1, 320, 64, {4, 8, 8}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last);
      EXPECT_EQ(refusal(wide), "");
      EXPECT_EQ(choice(wide), Mainloop::kStream);
      EXPECT_EQ(choice(make(2, 64, 32, {8, 64, 64}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}, dtype, last)),
                Mainloop::kResident);
    }
  }
  // One multiprocessor for each class of the resident kernel.
  EXPECT_EQ(choose_mainloop(make(2, 32, 3200, {8, 8, 8}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}), 132), Mainloop::kStream);
}

TEST(Sm90Choice, OtherStridesStream) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16}) {
    for (bool last : {false, true}) {
      Problem p = make(2, 96, 48, {64, 64, 32}, {3, 3, 1}, {1, 1, 0}, {1, 1, 0}, dtype, last);
      p.stride[2] = 1;
      test::pack(p, last ? test::Layout::kNdhwc : test::Layout::kNcdhw);
      EXPECT_EQ(refusal(p), "");
      EXPECT_EQ(choose_mainloop(p, 132), Mainloop::kStream);
      EXPECT_TRUE(worthwhile(p, kH200));
    }
  }
  // One row of outputs leaves a residue without rows: no box of the copy engine.
  Problem const flat = make(1, 320, 64, {4, 1, 8}, {3, 3, 3}, {1, 1, 1}, {1, 0, 1}, CONVT3D_F16, true);
  EXPECT_EQ(refusal(flat), "");
  EXPECT_NE(stream::choose_paths(flat).y, stream::Path::kBoxes);
  // Pairs of outputs along W need twice the columns of x: with more planes nothing is left for y.
  Problem p = make(1, 64, 64, {5, 17, 32}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0});
  for (int i = 0; i < 3; ++i) p.stride[i] = 1;
  test::pack(p, test::Layout::kNcdhw);
  EXPECT_FALSE(has_usual_kernel(p, 132));
  p.precision = CONVT3D_IEEE;
  EXPECT_NE(refusal(p), "");
}

TEST(Sm90Choice, MostlyEmptyTilesAreNotWorthwhile) {
  auto from = [](int size) {
    return make(64, 256, 128, {size, size, size}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, CONVT3D_F16);
  };
  EXPECT_FALSE(worthwhile(from(4), kH200));
  EXPECT_TRUE(worthwhile(from(8), kH200));
  EXPECT_TRUE(worthwhile(from(24), kH200));
  // In ieee mode, where each product is three, half-empty ones neither.
  auto parts_from = [&](int size) {
    Problem p = from(size);
    p.dtype = CONVT3D_F32;
    p.precision = CONVT3D_IEEE;
    return p;
  };
  EXPECT_FALSE(worthwhile(parts_from(8), kH200));
  EXPECT_TRUE(worthwhile(parts_from(16), kH200));
  EXPECT_TRUE(worthwhile(parts_from(24), kH200));
}

TEST(Sm90Choice, SmallProblemsGoToTheFasterFamily) {
  // Measured on an H200, each with the other family at least 1.25 times slower; docs/performance-log.md.
  struct Case {
    int mode, kernel, in, out, size, batch;
    bool last, sm90;
  };
  constexpr int kTf32 = 0, kIeee = 1, kF16 = 2;
  Case const cases[] = {
      {kF16, 2, 64, 32, 6, 2, true, false},     {kF16, 2, 32, 32, 8, 1, true, false},
      {kTf32, 2, 32, 32, 6, 2, false, false},   {kF16, 2, 32, 32, 24, 2, false, true},
      {kF16, 2, 128, 128, 4, 2, true, false},   {kTf32, 2, 256, 128, 4, 2, false, false},
      {kTf32, 2, 768, 128, 4, 2, true, false},  {kTf32, 2, 768, 128, 8, 2, false, true},
      {kF16, 3, 128, 128, 8, 2, false, true},   {kTf32, 2, 320, 320, 8, 1, true, true},
      {kTf32, 3, 768, 128, 6, 1, false, false}, {kF16, 3, 768, 128, 6, 1, true, false},
      {kF16, 3, 512, 256, 6, 8, false, false},  {kF16, 2, 64, 32, 32, 1, false, true},
      {kIeee, 2, 128, 64, 12, 1, true, false},  {kIeee, 3, 320, 256, 8, 8, true, true},
  };
  for (Case const& c : cases) {
    int const border = c.kernel - 2;
    Problem p =
        make(c.batch, c.in, c.out, {c.size, c.size, c.size}, {c.kernel, c.kernel, c.kernel}, {border, border, border},
             {border, border, border}, c.mode == kF16 ? CONVT3D_F16 : CONVT3D_F32, c.last);
    if (c.mode == kIeee) p.precision = CONVT3D_IEEE;
    EXPECT_EQ(worthwhile(p, kH200), c.sm90) << c.in << " -> " << c.out << ", kernel " << c.kernel << ", size " << c.size
                                            << ", batch " << c.batch << ", mode " << c.mode << ", last " << c.last;
  }
}

TEST(Sm90Choice, RowsThatStartAnywhereAreChosen) {
  auto odd = [](int in, int out, int size, convt3d_dtype dtype = CONVT3D_F32, bool last = false) {
    return make(2, in, out, {size, size, size}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, dtype, last);
  };
  EXPECT_EQ(refusal(odd(128, 64, 32)), "");
  EXPECT_TRUE(worthwhile(odd(128, 64, 32), kH200));
  EXPECT_TRUE(worthwhile(odd(128, 64, 32, CONVT3D_F16), kH200));
  EXPECT_TRUE(worthwhile(odd(128, 64, 32, CONVT3D_F16, true), kH200));  // rows of channels: boxes
  EXPECT_TRUE(worthwhile(odd(128, 13, 32, CONVT3D_F32, true), kH200));
  EXPECT_TRUE(worthwhile(make(2, 64, 14, {48, 48, 48}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, CONVT3D_F16), kH200));
  Problem p = odd(128, 64, 32);
  p.has_add = 1;
  for (int i = 0; i < 5; ++i) p.add_stride[i] = odd(128, 64, 32, CONVT3D_F32, true).y_stride[i];
  EXPECT_EQ(refusal(p), "");
  EXPECT_FALSE(worthwhile(p, kH200)) << "an add without neighbours along W";
  for (bool last : {false, true}) {
    for (int channels : {32, 128}) {
      for (int kernel : {4, 5}) {
        p = make(2, channels, 16, {32, 32, 32}, {2, kernel, kernel}, {0, 0, 0}, {0, 0, 0}, CONVT3D_F32, last);
        p.stride[1] = p.stride[2] = 4;
        test::pack(p, last ? test::Layout::kNdhwc : test::Layout::kNcdhw);
        EXPECT_EQ(refusal(p), "");
        // Where the kernel is the stride, the sm80 family has one for patch expansion.
        EXPECT_EQ(worthwhile(p, kH200), kernel == 5 && (!last || channels == 128));
      }
    }
  }
}

TEST(Sm90Supported, MixedFormatsStream) {
  Problem const last = reference(CONVT3D_F16, true);
  Problem p = reference(CONVT3D_F16, false);
  for (int i = 0; i < 5; ++i) p.x_stride[i] = last.x_stride[i];
  EXPECT_EQ(refusal(p), "");
  EXPECT_EQ(choose_mainloop(p, 132), Mainloop::kStream);
  p = last;
  for (int i = 0; i < 5; ++i) p.add_stride[i] = reference(CONVT3D_F16, false).add_stride[i];
  EXPECT_EQ(refusal(p), "");
  EXPECT_EQ(choose_mainloop(p, 132), Mainloop::kStream);
}

TEST(Sm90Supported, AnyBroadcastOverVoxelsIsTaken) {
  for (bool last : {false, true}) {
    Problem p = reference(CONVT3D_F16, last);
    for (int i = 2; i < 5; ++i) p.add_stride[i] = 0;
    p.add_stride[0] = 64;
    p.add_stride[1] = 1;
    p.add_alignment = 2;
    EXPECT_EQ(refusal(p), "");
    p.add_stride[0] = p.add_stride[1] = 0;
    EXPECT_EQ(refusal(p), "");
  }
}

}  // namespace
}  // namespace convt3d::sm90
