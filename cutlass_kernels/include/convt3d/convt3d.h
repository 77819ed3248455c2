/* SPDX-License-Identifier: Apache-2.0
 *
 * convt3d: 3D transposed convolution fused with bias, add and activation.
 *
 *     y = act(conv_transpose3d(x, weight) + bias + add)      add_order BEFORE
 *     y = act(conv_transpose3d(x, weight) + bias) + add      add_order AFTER
 *
 * With convt3d_backward.h and convt3d_copy.h the whole interface: plain C, no torch, exceptions, printing or exit.
 * One description of the problem, `convt3d_problem`, travels unchanged from the caller to the kernels.
 * Every function returns a status; on failure `message` (if not null) receives one line that names the
 * offending argument, cut to `capacity` bytes including the terminating zero.
 *
 * Triples are ordered (D, H, W). Strides are in elements and ordered (N, C, D, H, W) whatever the memory
 * layout is, so that contiguous NCDHW, NDHWC, channel slices of larger buffers and broadcast operands
 * (stride 0) are all said in the same way.
 */
#ifndef CONVT3D_CONVT3D_H_
#define CONVT3D_CONVT3D_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CONVT3D_API
#else
#define CONVT3D_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum convt3d_status {
  CONVT3D_OK = 0,
  CONVT3D_INVALID_ARGUMENT = 1,    /* the description contradicts itself; nothing was done */
  CONVT3D_NOT_SUPPORTED = 2,       /* valid, but this kernel cannot do it; nothing was done */
  CONVT3D_WORKSPACE_TOO_SMALL = 3, /* `workspace_bytes` is less than the plan asks for; nothing was done */
  CONVT3D_CUDA_ERROR = 4           /* a CUDA call failed; the message has its text */
} convt3d_status;

typedef enum convt3d_dtype { CONVT3D_F32 = 0, CONVT3D_F16 = 1, CONVT3D_BF16 = 2 } convt3d_dtype;

/* Arithmetic of the multiplications for CONVT3D_F32. Ignored for 16-bit types. Sums are always fp32. */
typedef enum convt3d_precision {
  CONVT3D_IEEE = 0, /* fp32 accuracy: three products of high and low parts */
  CONVT3D_TF32 = 1  /* operands rounded to TF32, to nearest, ties to even; one product */
} convt3d_precision;

/* Must match the table in activation.hpp, which says what each computes. */
typedef enum convt3d_activation {
  CONVT3D_ACT_NONE = 0,
  CONVT3D_ACT_RELU = 1,
  CONVT3D_ACT_LEAKY_RELU = 2,
  CONVT3D_ACT_ELU = 3,
  CONVT3D_ACT_GELU = 4,
  CONVT3D_ACT_GELU_TANH = 5,
  CONVT3D_ACT_SILU = 6,
  CONVT3D_ACT_SIGMOID = 7,
  CONVT3D_ACT_TANH = 8,
  CONVT3D_ACT_HARDSWISH = 9,
  CONVT3D_ACT_X_HARDSWISH = 10,
  CONVT3D_ACT_COUNT = 11
} convt3d_activation;

typedef enum convt3d_add_order { CONVT3D_ADD_BEFORE = 0, CONVT3D_ADD_AFTER = 1 } convt3d_add_order;

/* Kernel families. AUTO lets the library choose the fastest one that supports the problem. */
typedef enum convt3d_kernel {
  CONVT3D_KERNEL_AUTO = 0,
  CONVT3D_KERNEL_SM80 = 1,
  CONVT3D_KERNEL_SM90 = 2
} convt3d_kernel;

typedef struct convt3d_problem {
  /* Sizes. weight is (in_channels, out_channels / groups, kD, kH, kW). */
  int64_t batch;
  int64_t in_channels;
  int64_t out_channels;
  int64_t groups;
  int64_t in_size[3];
  int64_t kernel[3];
  int64_t stride[3];
  int64_t padding[3];
  int64_t output_padding[3];
  int64_t dilation[3];
  /* Strides in elements, (N, C, D, H, W); weight: (Cin, Cout, kD, kH, kW). Non-negative; 0 broadcasts
   * (x, bias and add only). */
  int64_t x_stride[5];
  int64_t weight_stride[5];
  int64_t bias_stride;
  int64_t add_stride[5];
  int64_t y_stride[5];
  /* Largest power of two, at most 16, that divides the address of the first element, in bytes. */
  int32_t x_alignment;
  int32_t add_alignment;
  int32_t y_alignment;
  int32_t has_bias;     /* 0 or 1 */
  int32_t has_add;      /* 0 or 1 */
  int32_t dtype;        /* convt3d_dtype, of every tensor */
  int32_t precision;    /* convt3d_precision */
  int32_t activation;   /* convt3d_activation */
  int32_t add_order;    /* convt3d_add_order */
  float negative_slope; /* of leaky_relu */
} convt3d_problem;

/* What the choice of a kernel depends on, so that it can be asked about a device that is not there. */
typedef struct convt3d_device {
  int32_t compute_capability; /* 10 * major + minor, e.g. 90 */
  int32_t multiprocessors;
} convt3d_device;

typedef struct convt3d_plan {
  int32_t kernel;         /* the convt3d_kernel that runs; never AUTO */
  int32_t reserved;       /* for the library: which of the kernel's forms AUTO chose; 0 is the usual one */
  size_t workspace_bytes; /* device memory `convt3d_forward` needs, at least 16-byte aligned */
} convt3d_plan;

/* Device pointers. bias and add may be null where the problem says there is none. */
typedef struct convt3d_tensors {
  const void* x;
  const void* weight;
  const void* bias;
  const void* add;
  void* y;
  void* workspace;
  size_t workspace_bytes;
} convt3d_tensors;

/* "major.minor.patch" */
CONVT3D_API const char* convt3d_version(void);

/* A static name ("sm80", "x_hardswish", ...), or null for a value out of range. */
CONVT3D_API const char* convt3d_kernel_name(int32_t kernel);
CONVT3D_API const char* convt3d_activation_name(int32_t activation);

/* Output size per dimension: (i - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1.
 * Checks everything it depends on. A result of 0 is valid, a negative one is not. */
CONVT3D_API convt3d_status convt3d_output_size(const convt3d_problem* problem, int64_t out_size[3], char* message,
                                               size_t capacity);

/* Checks the whole description, in 64-bit arithmetic with overflow checks. */
CONVT3D_API convt3d_status convt3d_validate(const convt3d_problem* problem, char* message, size_t capacity);

/* Whether `kernel` (not AUTO) can run the problem on such a device: OK, or NOT_SUPPORTED with the reason.
 * Never OK for what the kernel cannot do. */
CONVT3D_API convt3d_status convt3d_supported(const convt3d_problem* problem, convt3d_kernel kernel,
                                             const convt3d_device* device, char* message, size_t capacity);

/* Chooses a kernel (AUTO: the fastest; docs/c-library.md says what it leaves to ATen) and sizes its workspace. */
CONVT3D_API convt3d_status convt3d_make_plan(const convt3d_problem* problem, convt3d_kernel kernel,
                                             const convt3d_device* device, convt3d_plan* plan, char* message,
                                             size_t capacity);

/* The current CUDA device. NOT_SUPPORTED with the reason where there is no usable driver or device. */
CONVT3D_API convt3d_status convt3d_current_device(convt3d_device* device, char* message, size_t capacity);

/* Enqueues the operator on `stream` (a cudaStream_t; null is the legacy default stream) of the current
 * device. Does not allocate, synchronise or keep anything between calls, so it can be captured into a CUDA
 * graph. y must not overlap any input. An empty output is OK and launches nothing. */
CONVT3D_API convt3d_status convt3d_forward(const convt3d_problem* problem, const convt3d_plan* plan,
                                           const convt3d_tensors* tensors, void* stream, char* message,
                                           size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* CONVT3D_CONVT3D_H_ */
