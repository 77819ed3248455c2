/* SPDX-License-Identifier: Apache-2.0
 *
 * The pointwise half of a backward pass, in one pass over memory. With t = conv_transpose3d(x, weight) + bias
 * (+ add, where it comes before the activation) and y = act(t):
 *
 *     grad_pre  = grad_output * act'(t)
 *     grad_bias = grad_pre, summed over N, D, H and W for each channel
 *
 * grad_pre is also the gradient of an `add` that comes before the activation, and what the gradients of x and weight
 * are convolutions of. Those run on tensor cores over NDHWC tensors alone, so a caller with NCDHW tensors can have
 * grad_pre in that order as well, or instead. Computed in fp32; grad_pre is rounded once, at the end, and grad_bias
 * sums unrounded values.
 * The conventions are those of convt3d.h.
 */
#ifndef CONVT3D_CONVT3D_BACKWARD_H_
#define CONVT3D_CONVT3D_BACKWARD_H_

#include "convt3d/convt3d.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct convt3d_activation_gradient {
  int64_t size[5]; /* (N, C, D, H, W) of every tensor */
  /* Strides in elements. Non-negative; 0 broadcasts (grad_output and t only). */
  int64_t grad_output_stride[5];
  int64_t t_stride[5]; /* unused where the activation is none: t is not read then */
  int64_t grad_pre_stride[5];
  int32_t grad_output_alignment; /* as in convt3d_problem */
  int32_t t_alignment;
  int32_t grad_pre_alignment;
  int32_t has_grad_pre;       /* 0 or 1, each: what is wanted */
  int32_t has_grad_pre_ndhwc; /* packed, C fastest */
  int32_t has_grad_bias;
  int32_t dtype;        /* convt3d_dtype, of grad_output, t and grad_pre */
  int32_t activation;   /* convt3d_activation */
  float negative_slope; /* of leaky_relu */
} convt3d_activation_gradient;

/* Device pointers; those that the description has no use for may be null. grad_pre may be t or grad_output itself
 * (the same address and strides), and must not overlap an input otherwise. */
typedef struct convt3d_activation_gradient_tensors {
  const void* grad_output;
  const void* t;
  void* grad_pre;
  void* grad_pre_ndhwc; /* 16-byte aligned; must not overlap another tensor */
  float* grad_bias;     /* C neighbouring values; fp32 whatever the dtype is */
  void* workspace;
  size_t workspace_bytes;
} convt3d_activation_gradient_tensors;

/* Checks the whole description, and gives the device memory that `convt3d_backward_activation` needs for it, at least
 * 16-byte aligned. NOT_SUPPORTED with the reason where grad_pre_ndhwc cannot be had: it takes neighbours along W or a
 * constant in every other tensor, and channels and positions in whole 16-byte accesses. */
CONVT3D_API convt3d_status convt3d_backward_activation_workspace(const convt3d_activation_gradient* description,
                                                                 size_t* workspace_bytes, char* message,
                                                                 size_t capacity);

/* Enqueues the work on `stream` of the current device. Neither allocates nor synchronises, as convt3d_forward, and
 * gives the same bits in every run. Without elements it launches nothing, and clears grad_bias. */
CONVT3D_API convt3d_status convt3d_backward_activation(const convt3d_activation_gradient* description,
                                                       const convt3d_activation_gradient_tensors* tensors, void* stream,
                                                       char* message, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* CONVT3D_CONVT3D_BACKWARD_H_ */
