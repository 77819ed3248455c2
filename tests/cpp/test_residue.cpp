// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "convt3d/residue.hpp"
#include "reference.hpp"

namespace convt3d {
namespace {

using test::for_each_index;
using test::Random;
using test::Tensor;

// ---- known tables, checked while compiling ---------------------------------------------------------------------

constexpr ResidueClass known_class(int index, int64_t out, int64_t kernel, int64_t stride, int64_t padding) {
  int64_t const o[3] = {out, out, out}, k[3] = {kernel, kernel, kernel}, s[3] = {stride, stride, stride},
                p[3] = {padding, padding, padding}, d[3] = {1, 1, 1};
  return residue_class(index, o, k, s, p, d);
}

constexpr bool tap_counts_are(int64_t out, int64_t kernel, int64_t padding, int64_t const (&expected)[8]) {
  int64_t total = 0;
  for (int c = 0; c < 8; ++c) {
    if (known_class(c, out, kernel, 2, padding).taps() != expected[c]) return false;
    total += expected[c];
  }
  return total == kernel * kernel * kernel;
}

static_assert(tap_counts_are(32, 3, 1, {1, 2, 2, 4, 2, 4, 4, 8}), "k3 s2 p1 op1");
static_assert(tap_counts_are(32, 2, 0, {1, 1, 1, 1, 1, 1, 1, 1}), "k2 s2 p0");
static_assert(tap_counts_are(32, 4, 1, {8, 8, 8, 8, 8, 8, 8, 8}), "k4 s2 p1");

// k3 s2 p1 op1: even o = 2i takes tap 1 at i; odd o = 2i + 1 takes tap 0 at i + 1 and tap 2 at i.
constexpr ResidueClass1d kEven = residue_class_1d(0, 32, 3, 2, 1, 1);
static_assert(kEven.count == 16 && kEven.taps == 1 && kEven.tap(0) == 1 && kEven.input(5, 0) == 5, "");
constexpr ResidueClass1d kOdd = residue_class_1d(1, 32, 3, 2, 1, 1);
static_assert(kOdd.count == 16 && kOdd.taps == 2 && kOdd.base == 1 && kOdd.input_step == 1, "");
static_assert(kOdd.tap(0) == 0 && kOdd.input(5, 0) == 6 && kOdd.tap(1) == 2 && kOdd.input(5, 1) == 5, "");
static_assert(kOdd.output(5) == 11, "");

// k1 s2: every second output has no tap.
static_assert(residue_class_1d(1, 7, 1, 2, 0, 1).taps == 0 && residue_class_1d(1, 7, 1, 2, 0, 1).count == 3, "");
// An output shorter than the stride: the last classes have no outputs.
static_assert(known_class(7, 1, 3, 2, 1).is_empty() && !known_class(0, 1, 3, 2, 1).is_empty(), "");

// ---- against the gather written from the definition ------------------------------------------------------------

// (tap, input) pairs of one output: all k for which o + padding - k * dilation is a multiple of the stride.
std::vector<std::pair<int64_t, int64_t>> gather(int64_t o, int64_t kernel, int64_t stride, int64_t padding,
                                                int64_t dilation) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t k = 0; k < kernel; ++k) {
    int64_t const scaled = o + padding - k * dilation;
    if (scaled % stride == 0) pairs.emplace_back(k, scaled / stride);
  }
  return pairs;
}

// Checks one configuration and returns how many classes lack a tap and how many have a negative base.
std::pair<int, int> check_1d(int64_t out, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  std::vector<int> covered(static_cast<size_t>(out), 0);
  int without_tap = 0, negative_base = 0;
  for (int64_t r = 0; r < stride; ++r) {
    ResidueClass1d const c = residue_class_1d(r, out, kernel, stride, padding, dilation);
    without_tap += c.taps == 0;
    negative_base += c.base < 0;
    for (int64_t j = 0; j < c.count; ++j) {
      int64_t const o = c.output(j);
      EXPECT_TRUE(o >= 0 && o < out) << o;
      if (o < 0 || o >= out) continue;
      ++covered[static_cast<size_t>(o)];
      std::vector<std::pair<int64_t, int64_t>> pairs;
      for (int64_t t = 0; t < c.taps; ++t) pairs.emplace_back(c.tap(t), c.input(j, t));
      EXPECT_EQ(pairs, gather(o, kernel, stride, padding, dilation))
          << "o " << o << " k " << kernel << " s " << stride << " p " << padding << " d " << dilation;
    }
  }
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int times) { return times == 1; }))
      << "every output belongs to one class";
  return {without_tap, negative_base};
}

TEST(ResidueClass1d, EqualsTheGatherExhaustively) {
  int configurations = 0, without_tap = 0, negative_base = 0;
  for (int64_t kernel = 1; kernel <= 5; ++kernel)
    for (int64_t stride = 1; stride <= 4; ++stride)
      for (int64_t padding = 0; padding <= kernel; ++padding)
        for (int64_t dilation = 1; dilation <= 3; ++dilation)
          for (int64_t extra = 0; extra < std::max(stride, dilation); ++extra)
            for (int64_t in = 1; in <= 6; ++in) {
              int64_t const out = (in - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1;
              if (out < 0) continue;
              auto const [no_tap, negative] = check_1d(out, kernel, stride, padding, dilation);
              ++configurations;
              without_tap += no_tap;
              negative_base += negative;
            }
  // The sweep met the rare kinds.
  EXPECT_GT(configurations, 3900);
  EXPECT_GT(without_tap, 0);
  EXPECT_GT(negative_base, 0);
}

TEST(ResidueClass1d, LargeStridesDilationsAndKernels) {
  for (int64_t stride : {5, 6, 7, 12, 30})
    for (int64_t dilation : {1, 4, 5, 6, 10, 18, 45})
      for (int64_t kernel : {1, 2, 7, 31})
        for (int64_t padding : {0, 3, 50}) check_1d(97, kernel, stride, padding, dilation);
}

TEST(ResidueClass1d, DoesNotOverflowOnTheLargestValidSizes) {
  int64_t const huge = std::numeric_limits<int64_t>::max() / 4;
  ResidueClass1d const c = residue_class_1d(huge - 1, huge, 3, huge, 1, huge - 2);
  EXPECT_EQ(c.count, 1);
  EXPECT_EQ(c.taps, 1);  // o + padding = huge: tap 0 at input 1
  EXPECT_EQ(c.tap(0), 0);
  EXPECT_EQ(c.input(0, 0), 1);
}

// ---- whole convolutions: the classes' unit-stride gathers assemble to the scatter --------------------------------

Tensor gather_by_classes(Problem const& p, Tensor const& x, Tensor const& weight) {
  Size5 const xs = x_shape(p), ys = y_shape(p), ws = weight_shape(p);
  Tensor y(static_cast<size_t>(element_count(ys)), std::nan(""));
  for (int64_t index = 0; index < residue_class_count(p.stride); ++index) {
    ResidueClass const c = residue_class(p, index);
    ResidueClass1d const &D = c.dim[0], &H = c.dim[1], &W = c.dim[2];
    for_each_index({{ys[0], ys[1], D.count, H.count, W.count}}, [&](int64_t const* j) {
      double sum = 0;
      for_each_index({{1, xs[1], D.taps, H.taps, W.taps}}, [&](int64_t const* t) {
        int64_t const i[3] = {D.input(j[2], t[2]), H.input(j[3], t[3]), W.input(j[4], t[4])};
        for (int axis = 0; axis < 3; ++axis) {
          if (i[axis] < 0 || i[axis] >= p.in_size[axis]) return;
        }
        int64_t const x_at = (((j[0] * xs[1] + t[1]) * xs[2] + i[0]) * xs[3] + i[1]) * xs[4] + i[2];
        int64_t const w_at =
            (((t[1] * ws[1] + j[1]) * ws[2] + D.tap(t[2])) * ws[3] + H.tap(t[3])) * ws[4] + W.tap(t[4]);
        sum += x[static_cast<size_t>(x_at)] * weight[static_cast<size_t>(w_at)];
      });
      int64_t const y_at =
          (((j[0] * ys[1] + j[1]) * ys[2] + D.output(j[2])) * ys[3] + H.output(j[3])) * ys[4] + W.output(j[4]);
      EXPECT_TRUE(std::isnan(y[static_cast<size_t>(y_at)])) << "an output was written twice";
      y[static_cast<size_t>(y_at)] = sum;
    });
  }
  return y;
}

TEST(ResidueClass, AssemblesToTheScatterInThreeDimensions) {
  Random random(3);
  test::CaseLimits limits;
  limits.batch = 2;
  limits.channels = 3;
  limits.in_size = 4;
  for (int trial = 0; trial < 120; ++trial) {
    Problem const p = test::random_problem(random, limits);
    // Small integers: every sum is exact, so the comparison is for equality.
    Tensor x(static_cast<size_t>(element_count(x_shape(p)))),
        weight(static_cast<size_t>(element_count(weight_shape(p))));
    for (double& value : x) value = static_cast<double>(random.integer(-9, 9));
    for (double& value : weight) value = static_cast<double>(random.integer(-9, 9));
    ASSERT_EQ(gather_by_classes(p, x, weight), test::scatter_reference(p, x, weight)) << test::describe(p);
  }
}

}  // namespace
}  // namespace convt3d
