// SPDX-License-Identifier: Apache-2.0
//
// How a copy is laid out, and what a description may say, without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cases.hpp"
#include "copy/copy.hpp"

namespace convt3d::copy {
namespace {

using test::Layout;

/// `channels` of a tensor, from the start of one that has more.
Description slice(Size5 shape, int64_t whole_channels, Layout layout, int32_t dtype) {
  Description d{};
  std::copy(shape.v, shape.v + 5, d.size);
  test::pack(shape, layout, d.source_stride);
  shape.v[1] = whole_channels;
  test::pack(shape, layout, d.target_stride);
  d.dtype = dtype;
  d.source_alignment = d.target_alignment = 16;
  return d;
}

convt3d_status supported(Description const& d, std::string* why = nullptr) {
  char text[256] = "";
  convt3d_status const status = convt3d_copy_supported(&d, text, sizeof text);
  if (why != nullptr) *why = text;
  return status;
}

/// Copies by the rows that were laid out, on the host, and compares with a copy by the strides.
void check_rows(Description const& d, Size5 const& whole) {
  char text[256] = "";
  Message message(text, sizeof text);
  Rows rows;
  ASSERT_EQ(lay_out(d, rows, message), CONVT3D_OK) << text;
  int const per_access = d.dtype == CONVT3D_F32 ? 4 : 8;
  int64_t count = 1;
  for (int64_t size : d.size) count *= size;
  ASSERT_EQ(rows.count * rows.vectors * per_access, count);
  std::vector<int64_t> wanted(static_cast<size_t>(element_count(whole)), -1), got = wanted;
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, from = 0, to = 0;
    for (int axis = 4; axis >= 0; --axis) {
      from += rest % d.size[axis] * d.source_stride[axis];
      to += rest % d.size[axis] * d.target_stride[axis];
      rest /= d.size[axis];
    }
    wanted[static_cast<size_t>(to)] = from;
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t e = 0; e < rows.vectors * per_access; ++e) {
      got[static_cast<size_t>(row * rows.target_pitch * per_access + e)] = row * rows.source_pitch * per_access + e;
    }
  }
  EXPECT_TRUE(got == wanted);
}

TEST(Copy, RowsAreTheCopy) {
  for (int32_t dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
    for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
      for (Size5 const& shape : {Size5{{2, 8, 3, 2, 4}}, Size5{{1, 16, 2, 2, 2}}, Size5{{3, 24, 1, 1, 8}},
                                 Size5{{2, 8, 1, 1, 1}}, Size5{{1, 8, 1, 1, 1}}}) {
        Size5 whole = shape;
        whole.v[1] += 16;
        check_rows(slice(shape, whole[1], layout, dtype), whole);
        check_rows(slice(shape, shape[1], layout, dtype), shape);
      }
    }
  }
}

TEST(Copy, RefusesWhatIsNotRowsOfWholeAccesses) {
  Size5 const shape{{2, 8, 3, 2, 4}};
  std::string why;
  Description d = slice(shape, 16, Layout::kNdhwc, CONVT3D_F16);
  ASSERT_EQ(supported(d), CONVT3D_OK);
  d.target_alignment = 8;
  EXPECT_EQ(supported(d, &why), CONVT3D_NOT_SUPPORTED);
  EXPECT_NE(why.find("16-byte"), std::string::npos) << why;
  d = slice(shape, 16, Layout::kNdhwc, CONVT3D_F16);
  d.source_alignment = 2;
  EXPECT_EQ(supported(d), CONVT3D_NOT_SUPPORTED);
  EXPECT_EQ(supported(slice(shape, 12, Layout::kNdhwc, CONVT3D_F16)), CONVT3D_NOT_SUPPORTED);  // a pitch of 24 bytes
  EXPECT_EQ(supported(slice({{2, 4, 3, 2, 4}}, 16, Layout::kNdhwc, CONVT3D_F16)), CONVT3D_NOT_SUPPORTED);
  d = slice(shape, 16, Layout::kNdhwc, CONVT3D_F32);
  test::pack(shape, Layout::kNcdhw, d.source_stride);  // another order
  EXPECT_EQ(supported(d), CONVT3D_NOT_SUPPORTED);
  d = slice(shape, 16, Layout::kNcdhw, CONVT3D_F32);
  d.source_stride[2] = 0;  // a broadcast within a row
  EXPECT_EQ(supported(d), CONVT3D_NOT_SUPPORTED);
  d = slice({{2, 1, 1, 1, int64_t{1} << 33}}, 2, Layout::kNcdhw, CONVT3D_F32);
  EXPECT_EQ(supported(d, &why), CONVT3D_NOT_SUPPORTED);
  EXPECT_NE(why.find("2^31"), std::string::npos) << why;
}

TEST(Copy, NamesWhatIsWrong) {
  Size5 const shape{{2, 8, 3, 2, 4}};
  auto const wrong = [&](auto change, char const* name) {
    Description d = slice(shape, 16, Layout::kNcdhw, CONVT3D_F32);
    change(d);
    std::string why;
    EXPECT_EQ(supported(d, &why), CONVT3D_INVALID_ARGUMENT);
    EXPECT_NE(why.find(name), std::string::npos) << why;
  };
  wrong([](Description& d) { d.size[3] = -1; }, "size");
  wrong([](Description& d) { d.dtype = 3; }, "dtype");
  wrong([](Description& d) { d.source_stride[1] = -4; }, "source_stride");
  wrong([](Description& d) { d.target_stride[1] = 0; }, "target_stride");
  wrong([](Description& d) { d.target_stride[2] = 4; }, "target_stride");
  wrong([](Description& d) { d.source_stride[0] = INT64_MAX; }, "source");
  wrong([](Description& d) { d.source_alignment = 3; }, "source_alignment");
  wrong([](Description& d) { d.target_alignment = 2; }, "target_alignment");
  char text[256] = "";
  EXPECT_EQ(convt3d_copy_supported(nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(text), "description is null");
}

TEST(Copy, ChecksPointersBeforeMemoryIsTouched) {
  Description const d = slice({{2, 8, 3, 2, 4}}, 16, Layout::kNcdhw, CONVT3D_F32);
  char text[256] = "";
  alignas(16) char memory[64];
  EXPECT_EQ(convt3d_copy_tensor(&d, nullptr, memory, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(text), "source is a null pointer");
  EXPECT_EQ(convt3d_copy_tensor(&d, memory, memory + 8, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_NE(std::string(text).find("not aligned to 16 bytes"), std::string::npos) << text;
  EXPECT_EQ(convt3d_copy_tensor(&d, memory, memory, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_NE(std::string(text).find("must not overlap"), std::string::npos) << text;
  Description const empty = slice({{2, 0, 3, 2, 4}}, 16, Layout::kNcdhw, CONVT3D_F32);
  EXPECT_EQ(convt3d_copy_tensor(&empty, nullptr, nullptr, nullptr, text, sizeof text), CONVT3D_OK) << text;
}

}  // namespace
}  // namespace convt3d::copy
