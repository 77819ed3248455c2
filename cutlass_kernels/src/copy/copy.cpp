// SPDX-License-Identifier: Apache-2.0
#include "copy/copy.hpp"

#include <algorithm>

#include "checks.hpp"

namespace convt3d::copy {

using namespace checks;

namespace {

// The kernel's columns, and the accesses that one step looks ahead, are 32-bit.
constexpr int64_t kMostVectors = int64_t{1} << 31;

Size5 shape_of(Description const& d) {
  Size5 shape;
  std::copy(d.size, d.size + 5, shape.v);
  return shape;
}

/// Everything that a caller can get wrong.
Status validate(Description const& d, Message& message) {
  for (int axis = 0; axis < 5; ++axis) {
    if (d.size[axis] < 0) {
      return message.fail(CONVT3D_INVALID_ARGUMENT, "size must not be negative, but is %lld along %s",
                          static_cast<long long>(d.size[axis]), kDimension[axis]);
    }
  }
  Status status = within("dtype", d.dtype, CONVT3D_BF16 + 1, message);
  if (status != CONVT3D_OK) return status;
  int const element = d.dtype == CONVT3D_F32 ? 4 : 2;
  Size5 const shape = shape_of(d);
  status = addressable("source", shape, d.source_stride, kDimension, element, message);
  if (status == CONVT3D_OK) status = addressable("target", shape, d.target_stride, kDimension, element, message);
  if (status == CONVT3D_OK) {
    status = power_of_two_alignment("source_alignment", d.source_alignment, element, message);
  }
  if (status == CONVT3D_OK) {
    status = power_of_two_alignment("target_alignment", d.target_alignment, element, message);
  }
  if (status != CONVT3D_OK || element_count(shape) == 0) return status;
  status = not_broadcast("target", shape, d.target_stride, kDimension, message);
  return status == CONVT3D_OK ? distinct_addresses("target", shape, d.target_stride, message) : status;
}

struct Run {
  int64_t size, source, target;  // strides
};

}  // namespace

Status lay_out(Description const& d, Rows& rows, Message& message) {
  Status const status = validate(d, message);
  rows = {};
  if (status != CONVT3D_OK || element_count(shape_of(d)) == 0) return status;

  // Innermost first; neighbours that are one run in both tensors are joined.
  int order[5] = {0, 1, 2, 3, 4};
  std::sort(order, order + 5, [&](int a, int b) { return d.target_stride[a] < d.target_stride[b]; });
  Run runs[5];
  int count = 0;
  for (int axis : order) {
    if (d.size[axis] == 1) continue;
    Run const next{d.size[axis], d.source_stride[axis], d.target_stride[axis]};
    Run* const inner = count > 0 ? &runs[count - 1] : nullptr;
    if (inner != nullptr && next.source == inner->source * inner->size && next.target == inner->target * inner->size) {
      inner->size *= next.size;
    } else {
      runs[count++] = next;
    }
  }

  int const per_access = kAccessBytes / (d.dtype == CONVT3D_F32 ? 4 : 2);
  Run const row = count > 0 ? runs[0] : Run{1, 1, 1};
  Run const outer = count > 1 ? runs[1] : Run{1, 0, 0};
  bool const good = count <= 2 && row.source == 1 && row.target == 1 && row.size % per_access == 0 &&
                    outer.source % per_access == 0 && outer.target % per_access == 0 &&
                    d.source_alignment == kAccessBytes && d.target_alignment == kAccessBytes;
  if (!good) {
    return message.fail(CONVT3D_NOT_SUPPORTED,
                        "copy: the tensors are not equally spaced rows of whole, aligned 16-byte accesses");
  }
  rows = {outer.size, row.size / per_access, outer.source / per_access, outer.target / per_access};
  if (rows.vectors < kMostVectors) return CONVT3D_OK;
  return message.fail(CONVT3D_NOT_SUPPORTED, "copy: a row has %lld accesses, the kernel takes less than 2^31",
                      static_cast<long long>(rows.vectors));
}

Status run(Description const& d, void const* source, void* target, void* stream, Message& message) {
  Rows rows;
  Status status = lay_out(d, rows, message);
  if (status != CONVT3D_OK || element_count(shape_of(d)) == 0) return status;
  status = check_pointer("source", source, d.source_alignment, message);
  if (status == CONVT3D_OK) status = check_pointer("target", target, d.target_alignment, message);
  if (status == CONVT3D_OK && source == target) {
    return message.fail(CONVT3D_INVALID_ARGUMENT, "target starts at the address of source; they must not overlap");
  }
  if (status != CONVT3D_OK) return status;
#if CONVT3D_WITH_CUDA
  cudaError_t const error = launch(rows, source, target, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return CONVT3D_OK;
  cudaGetLastError();  // reported here; the next call must not find it
  return message.fail(CONVT3D_CUDA_ERROR, "the copy did not launch: %s", cudaGetErrorString(error));
#else
  static_cast<void>(stream);
  return message.fail(CONVT3D_NOT_SUPPORTED, "this library was built without CUDA");
#endif
}

}  // namespace convt3d::copy
