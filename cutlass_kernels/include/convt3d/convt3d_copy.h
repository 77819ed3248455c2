/* SPDX-License-Identifier: Apache-2.0
 *
 * A copy between tensors whose elements lie in the same order, such as into a channel slice of a larger tensor: the
 * other half of a concatenation that convt3d_forward writes its part of. In 16-byte accesses, whatever the type is.
 * The conventions are those of convt3d.h.
 */
#ifndef CONVT3D_CONVT3D_COPY_H_
#define CONVT3D_CONVT3D_COPY_H_

#include "convt3d/convt3d.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct convt3d_copy {
  int64_t size[5]; /* (N, C, D, H, W) of both tensors */
  /* Strides in elements. Non-negative; no two elements of the target may have one address. */
  int64_t source_stride[5];
  int64_t target_stride[5];
  int32_t source_alignment; /* as in convt3d_problem */
  int32_t target_alignment;
  int32_t dtype; /* convt3d_dtype; nothing but its size matters */
  int32_t reserved;
} convt3d_copy;

/* Whether `convt3d_copy_tensor` takes the copy: OK, INVALID_ARGUMENT, or NOT_SUPPORTED with the reason where the
 * tensors are not equally spaced rows of whole 16-byte accesses. */
CONVT3D_API convt3d_status convt3d_copy_supported(const convt3d_copy* description, char* message, size_t capacity);

/* Enqueues the copy on `stream` of the current device. Device pointers; the tensors must not overlap. An empty copy
 * is OK and launches nothing. */
CONVT3D_API convt3d_status convt3d_copy_tensor(const convt3d_copy* description, const void* source, void* target,
                                               void* stream, char* message, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* CONVT3D_CONVT3D_COPY_H_ */
