// SPDX-License-Identifier: Apache-2.0
//
// convt3d_copy_tensor on the GPU: every bit of the slice, and nothing beside it. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include "convt3d/convt3d_copy.h"
#include "gpu_harness.hpp"

namespace convt3d {
namespace {

using test::DeviceBuffer;
using test::Layout;

TEST(CopyGpu, WritesTheSliceAndNothingElse) {
  char text[256] = "";
  convt3d_device device{};
  if (convt3d_current_device(&device, text, sizeof text) != CONVT3D_OK) GTEST_SKIP() << text;
  if (device.compute_capability < 80) GTEST_SKIP() << "the GPU is older than SM80";
  // A part of a step, a step and more, rows that begin within a step, and many of either.
  Size5 const shapes[] = {{{1, 8, 1, 1, 1}},    {{2, 8, 3, 4, 5}},     {{3, 24, 5, 7, 9}},
                          {{2, 320, 16, 8, 8}}, {{1, 64, 33, 17, 20}}, {{5, 8, 64, 40, 32}}};
  for (Size5 const& shape : shapes) {
    for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
      for (bool second : {false, true}) {
        Size5 whole = shape;
        whole.v[1] += 16;
        convt3d_copy d{};
        std::copy(shape.v, shape.v + 5, d.size);
        test::pack(shape, layout, d.source_stride);
        test::pack(whole, layout, d.target_stride);
        d.source_alignment = d.target_alignment = 16;
        d.dtype = CONVT3D_F16;
        if (convt3d_copy_supported(&d, text, sizeof text) != CONVT3D_OK) continue;  // odd planes in NCDHW
        int64_t const count = element_count(shape), total = element_count(whole);
        int64_t const offset = second ? 16 * d.target_stride[1] : 0;
        if (offset % 8 != 0) continue;
        std::vector<uint16_t> source(static_cast<size_t>(count)), target(static_cast<size_t>(total), 0x7e01);
        for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint16_t>(i * 40503u >> 3);
        DeviceBuffer from(source.size() * 2), to(target.size() * 2);
        test::check_cuda(cudaMemcpy(from.data(), source.data(), source.size() * 2, cudaMemcpyHostToDevice));
        test::check_cuda(cudaMemcpy(to.data(), target.data(), target.size() * 2, cudaMemcpyHostToDevice));
        ASSERT_EQ(convt3d_copy_tensor(&d, from.data(), to.data() + 2 * offset, nullptr, text, sizeof text), CONVT3D_OK)
            << text;
        std::vector<uint16_t> got(target.size());
        test::check_cuda(cudaMemcpy(got.data(), to.data(), got.size() * 2, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < count; ++i) {
          int64_t rest = i, at = offset, of = 0;
          for (int axis = 4; axis >= 0; --axis) {
            at += rest % shape[axis] * d.target_stride[axis];
            of += rest % shape[axis] * d.source_stride[axis];
            rest /= shape[axis];
          }
          target[static_cast<size_t>(at)] = source[static_cast<size_t>(of)];
        }
        EXPECT_TRUE(got == target) << shape[0] << " x " << shape[1] << " layout " << static_cast<int>(layout);
      }
    }
  }
}

}  // namespace
}  // namespace convt3d
