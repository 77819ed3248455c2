// SPDX-License-Identifier: Apache-2.0
//
// The operand mapping that the kernels rest on: PyTorch's results (recorded in torch_results.hpp) and the scatter
// that stands for them here, against CUTLASS's own definition of dgrad (its host reference):
//   1. a ConvTranspose3d weight, in channels-last order, is CUTLASS's KTRSC filter, without any flip, and
//      x is dY, y is dX;
//   2. each residue class is a unit-stride dgrad with its sub-filter (`residue.hpp`), and the classes' results,
//      written to their sub-lattices, are the whole.
// Data are small integers, so that every comparison is for equality. Host code only, yet compiled by nvcc, because
// CUTLASS's headers use CUDA's intrinsics.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cases.hpp"
#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/layout/tensor.h"
#include "cutlass/tensor_ref.h"
#include "cutlass/util/reference/host/convolution.h"
#include "reference.hpp"
#include "torch_results.hpp"

namespace convt3d {
namespace {

using test::for_each_index;
using test::Layout;
using test::Tensor;
using Ndhwc = cutlass::layout::TensorNDHWC;

/// A dense NDHWC (or KTRSC) tensor as CUTLASS sees it. `shape` is ordered (N, C, D, H, W).
struct CutlassTensor {
  explicit CutlassTensor(Size5 const& shape_, double fill = 0) : shape(shape_) {
    test::pack(shape, Layout::kNdhwc, stride);
    values.assign(static_cast<size_t>(element_count(shape)), fill);
  }
  double& at(int64_t const* index) { return values[static_cast<size_t>(test::offset_of(index, stride))]; }
  cutlass::TensorRef<double, Ndhwc> ref() {
    auto const extent = [&](int axis) { return static_cast<int>(shape[axis]); };
    return {values.data(),
            Ndhwc::packed(cutlass::Tensor5DCoord(extent(0), extent(2), extent(3), extent(4), extent(1)))};
  }

  Size5 shape;
  int64_t stride[5];
  std::vector<double> values;
};

/// dX = dgrad(dY, filter), by CUTLASS's host reference.
void cutlass_dgrad(CutlassTensor& dy, CutlassTensor& filter, CutlassTensor& dx, int64_t const (&pad)[3],
                   int64_t const (&stride)[3], int64_t const (&dilation)[3]) {
  auto const i = [](int64_t value) { return static_cast<int>(value); };
  cutlass::conv::Conv3dProblemSize const problem(
      i(dx.shape[0]), i(dx.shape[2]), i(dx.shape[3]), i(dx.shape[4]), i(dx.shape[1]), i(dy.shape[1]),
      i(filter.shape[2]), i(filter.shape[3]), i(filter.shape[4]), i(dy.shape[2]), i(dy.shape[3]), i(dy.shape[4]),
      i(pad[0]), i(pad[1]), i(pad[2]), i(stride[0]), i(stride[1]), i(stride[2]), i(dilation[0]), i(dilation[1]),
      i(dilation[2]), cutlass::conv::Mode::kCrossCorrelation);
  cutlass::reference::host::Conv3dDgrad<double, Ndhwc, double, Ndhwc, double, Ndhwc, double>(
      problem, dy.ref(), filter.ref(), dx.ref(), dx.ref(), 1.0, 0.0);
}

class Mapping : public testing::Test {
 protected:
  void draw() {
    test::CaseLimits limits;
    limits.batch = 2;
    limits.channels = 4;
    limits.in_size = 4;
    p = test::random_problem(random, limits);
    for (Tensor* tensor : {&x, &weight}) {
      tensor->resize(static_cast<size_t>(element_count(tensor == &x ? x_shape(p) : weight_shape(p))));
      for (double& value : *tensor) value = static_cast<double>(random.integer(-9, 9));
    }
    expected = test::scatter_reference(p, x, weight);
  }

  /// A logical-order tensor as a channels-last one.
  static CutlassTensor channels_last(Size5 const& shape, Tensor const& logical) {
    CutlassTensor result(shape);
    size_t next = 0;
    for_each_index(shape, [&](int64_t const* index) { result.at(index) = logical[next++]; });
    return result;
  }

  /// A case that PyTorch has computed.
  void take(test::TorchResult const& sample) {
    p = Problem{};
    p.batch = sample.batch;
    p.in_channels = sample.in_channels;
    p.out_channels = sample.out_channels;
    p.groups = 1;
    for (int axis = 0; axis < 3; ++axis) {
      p.in_size[axis] = sample.in_size[axis];
      p.kernel[axis] = sample.kernel[axis];
      p.stride[axis] = sample.stride[axis];
      p.padding[axis] = sample.padding[axis];
      p.output_padding[axis] = sample.output_padding[axis];
      p.dilation[axis] = sample.dilation[axis];
    }
    test::pack(p, Layout::kNdhwc);
    x = sample.x;
    weight = sample.weight;
    expected = sample.y;
  }

  /// y as one dgrad.
  Tensor whole() {
    CutlassTensor dy = channels_last(x_shape(p), x);
    CutlassTensor filter = channels_last(weight_shape(p), weight);  // (Cin, Cout, kD, kH, kW) -> K T R S C
    CutlassTensor dx(y_shape(p), std::nan(""));
    cutlass_dgrad(dy, filter, dx, p.padding, p.stride, p.dilation);
    return logical(dx);
  }

  /// y put together from a unit-stride dgrad for each residue class.
  Tensor by_classes() {
    CutlassTensor dy = channels_last(x_shape(p), x);
    CutlassTensor filter = channels_last(weight_shape(p), weight);
    CutlassTensor y(y_shape(p), std::nan(""));
    for (int64_t index = 0; index < residue_class_count(p.stride); ++index) {
      ResidueClass const c = residue_class(p, index);
      if (c.is_empty()) continue;
      classes_without_tap += c.taps() == 0;
      ResidueClass1d const &D = c.dim[0], &H = c.dim[1], &W = c.dim[2];

      CutlassTensor sub_filter(Size5{{p.in_channels, p.out_channels, D.taps, H.taps, W.taps}});
      for_each_index(sub_filter.shape, [&](int64_t const* t) {
        int64_t const source[5] = {t[0], t[1], D.tap(t[2]), H.tap(t[3]), W.tap(t[4])};
        sub_filter.at(t) = filter.at(source);
      });
      CutlassTensor part(Size5{{p.batch, p.out_channels, D.count, H.count, W.count}}, std::nan(""));
      cutlass_dgrad(dy, sub_filter, part, {D.base, H.base, W.base}, {1, 1, 1},
                    {D.input_step, H.input_step, W.input_step});

      for_each_index(part.shape, [&](int64_t const* j) {
        int64_t const target[5] = {j[0], j[1], D.output(j[2]), H.output(j[3]), W.output(j[4])};
        y.at(target) = part.at(j);
      });
    }
    return logical(y);
  }

  static Tensor logical(CutlassTensor& tensor) {
    Tensor result;
    for_each_index(tensor.shape, [&](int64_t const* index) { result.push_back(tensor.at(index)); });
    return result;
  }

  test::Random random{29};
  Problem p{};
  Tensor x, weight, expected;
  int classes_without_tap = 0;
};

TEST_F(Mapping, PyTorchsTransposedConvolutionIsDgradWithTheSameWeight) {
  for (test::TorchResult const& sample : test::torch_results()) {
    take(sample);
    ASSERT_EQ(element_count(y_shape(p)), static_cast<int64_t>(expected.size())) << sample.name;
    EXPECT_EQ(whole(), expected) << sample.name;
    EXPECT_EQ(by_classes(), expected) << sample.name;
    EXPECT_EQ(test::scatter_reference(p, x, weight), expected) << sample.name;
  }
  EXPECT_GT(classes_without_tap, 0) << "the samples have no class without taps";
}

TEST_F(Mapping, ATransposedConvolutionIsDgradWithTheSameWeight) {
  for (int trial = 0; trial < 60; ++trial) {
    draw();
    ASSERT_EQ(whole(), expected) << test::describe(p);
  }
}

TEST_F(Mapping, ResidueClassesAreUnitStrideDgrads) {
  for (int trial = 0; trial < 60; ++trial) {
    draw();
    ASSERT_EQ(by_classes(), expected) << test::describe(p);
  }
  EXPECT_GT(classes_without_tap, 0) << "the draw met no class without taps";
}

}  // namespace
}  // namespace convt3d
