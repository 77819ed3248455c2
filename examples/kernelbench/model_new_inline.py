# SPDX-License-Identifier: Apache-2.0
"""KernelBench level 2, problem 26, with a CUTLASS kernel that this file compiles: ``load_inline``.

Of the installed package it uses the sources alone (``convt3d.include_paths()``): the sm80 family's TF32
kernel, an implicit GEMM for each residue class of the output. Needs nvcc and CUTLASS's headers
(``CUTLASS_DIR``, or the package nvidia-cutlass); the first model compiles for about a minute.

PyTorch runs fp32 convolutions in TF32 unless told otherwise, and so does this kernel, always.
"""

import importlib.util
import os
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

import convt3d

# The family's host code, its pre-pass and one of its kernels, in one source file.
CUDA_SOURCE = r"""
#include <cuda_runtime.h>

#include "device.cpp"
#include "prepare/prepare.cu"
#include "sm80/instances/tf32_n64_long.cu"
#include "sm80/sm80.cu"

// The one kernel that is compiled here serves every call.
convt3d::sm80::LaunchFn convt3d::sm80::select_kernel(Problem const&) { return tf32_n64_long(false); }
convt3d::sm80::joint::JointLaunchFn convt3d::sm80::select_joint_kernel(Problem const&) { return nullptr; }
convt3d::sm80::patch::PatchLaunchFn convt3d::sm80::select_patch_kernel(Problem const&,
                                                                       convt3d_device const&) {
  return nullptr;
}
convt3d::sm80::columns::ColumnsLaunchFn convt3d::sm80::columns::select(Problem const&,
                                                                       convt3d_device const&) {
  return nullptr;
}
convt3d::Status convt3d::sm80::grouped::run(Problem const&, convt3d_tensors const&, void*, Message& message) {
  return message.fail(CONVT3D_NOT_SUPPORTED, "groups are not compiled here");
}

// Bytes of workspace, or -1 with the reason in `text`.
int64_t convt3d_inline_workspace(convt3d_problem const& problem, char* text, size_t capacity) {
  convt3d::Message message(text, capacity);
  convt3d_device device{};
  if (convt3d::current_device(&device, message) != CONVT3D_OK) return -1;
  convt3d::Family const& family = *convt3d::sm80_family();
  if (family.supported(problem, device, message) != CONVT3D_OK) return -1;
  return static_cast<int64_t>(family.workspace_bytes(problem, device));
}

bool convt3d_inline_run(convt3d_problem const& problem, convt3d_tensors const& tensors, void* stream,
                        char* text, size_t capacity) {
  convt3d::Message message(text, capacity);
  convt3d_plan const plan{CONVT3D_KERNEL_SM80, 0, tensors.workspace_bytes};
  return convt3d::sm80_family()->run(problem, plan, tensors, stream, message) == CONVT3D_OK;
}
"""

CPP_SOURCE = r"""
#include <torch/extension.h>

#include "convt3d/convt3d.h"

int64_t convt3d_inline_workspace(convt3d_problem const& problem, char* text, size_t capacity);
bool convt3d_inline_run(convt3d_problem const& problem, convt3d_tensors const& tensors, void* stream,
                        char* text, size_t capacity);

// act(conv_transpose3d(x, weight) + bias + add), contiguous float32 tensors, t * hardswish(t).
torch::Tensor forward(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, torch::Tensor add,
                      std::vector<int64_t> stride, std::vector<int64_t> padding,
                      std::vector<int64_t> output_padding, int64_t stream) {
  for (auto const& tensor : {x, weight, bias, add}) {
    TORCH_CHECK(tensor.is_cuda() && tensor.scalar_type() == torch::kFloat32, "expected CUDA float32 tensors");
  }
  TORCH_CHECK(x.dim() == 5 && weight.dim() == 5 && x.size(1) == weight.size(0), "x and weight do not fit");
  convt3d_problem problem{};
  problem.batch = x.size(0);
  problem.in_channels = x.size(1);
  problem.out_channels = weight.size(1);
  problem.groups = 1;
  std::vector<int64_t> shape = {x.size(0), weight.size(1)};
  for (int axis = 0; axis < 3; ++axis) {
    problem.in_size[axis] = x.size(2 + axis);
    problem.kernel[axis] = weight.size(2 + axis);
    problem.stride[axis] = stride.at(axis);
    problem.padding[axis] = padding.at(axis);
    problem.output_padding[axis] = output_padding.at(axis);
    problem.dilation[axis] = 1;
    shape.push_back((x.size(2 + axis) - 1) * stride[axis] - 2 * padding[axis] + weight.size(2 + axis) +
                    output_padding[axis]);
  }
  TORCH_CHECK(add.sizes() == torch::IntArrayRef(shape), "add must have the output's shape");
  TORCH_CHECK(bias.dim() == 1 && bias.size(0) == problem.out_channels, "bias must have Cout elements");
  torch::Tensor y = torch::empty(shape, x.options());
  for (int dim = 0; dim < 5; ++dim) {
    problem.x_stride[dim] = x.stride(dim);
    problem.weight_stride[dim] = weight.stride(dim);
    problem.add_stride[dim] = add.stride(dim);
    problem.y_stride[dim] = y.stride(dim);
  }
  problem.bias_stride = bias.stride(0);
  problem.has_bias = problem.has_add = 1;
  problem.x_alignment = problem.add_alignment = 4;  // of a float: enough for the NCDHW epilogue
  problem.y_alignment = 16;
  problem.dtype = CONVT3D_F32;
  problem.precision = CONVT3D_TF32;
  problem.activation = CONVT3D_ACT_X_HARDSWISH;
  problem.add_order = CONVT3D_ADD_BEFORE;

  char text[256] = "";
  int64_t const bytes = convt3d_inline_workspace(problem, text, sizeof(text));
  TORCH_CHECK(bytes >= 0, text);
  torch::Tensor workspace = torch::empty({bytes}, x.options().dtype(torch::kUInt8));
  convt3d_tensors tensors{};
  tensors.x = x.const_data_ptr();
  tensors.weight = weight.const_data_ptr();
  tensors.bias = bias.const_data_ptr();
  tensors.add = add.const_data_ptr();
  tensors.y = y.mutable_data_ptr();
  tensors.workspace = workspace.mutable_data_ptr();
  tensors.workspace_bytes = static_cast<size_t>(bytes);
  bool const good = convt3d_inline_run(problem, tensors, reinterpret_cast<void*>(stream), text, sizeof(text));
  TORCH_CHECK(good, text);
  return y;
}
"""


def cutlass_include():
    """The folder of CUTLASS's headers."""
    if "CUTLASS_DIR" in os.environ:
        return str(Path(os.environ["CUTLASS_DIR"]) / "include")
    package = importlib.util.find_spec("cutlass_library")
    if package is None or package.origin is None:
        raise RuntimeError("CUTLASS's headers: set CUTLASS_DIR, or pip install --no-deps nvidia-cutlass")
    return str(Path(package.origin).parent / "source" / "include")


CUDA_FLAGS = ["-O3", "--expt-relaxed-constexpr", "-DCONVT3D_WITH_CUDA=1"]


def build():
    """Compiles and loads the extension, once for each version of its sources."""
    if torch.cuda.is_available() and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    return load_inline(
        name="convt3d_kernelbench",
        cpp_sources=[CPP_SOURCE],
        cuda_sources=[CUDA_SOURCE],
        functions=["forward"],
        extra_include_paths=[*convt3d.include_paths(), cutlass_include()],
        extra_cflags=["-O3"],
        extra_cuda_cflags=CUDA_FLAGS,
        no_implicit_headers=True,  # the CUDA source knows nothing of torch
    )


extension = None


class ModelNew(nn.Module):
    """A transposed convolution, an added tensor, and t * hardswish(t): a pre-pass and one kernel launch."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, bias_shape):
        super().__init__()
        global extension
        extension = extension or build()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
        )
        # Drawn as the reference model draws it, which does not use it either.
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x, add_input):
        conv = self.conv_transpose
        return extension.forward(
            x,
            conv.weight,
            conv.bias,
            add_input,
            conv.stride,
            conv.padding,
            conv.output_padding,
            torch.cuda.current_stream().cuda_stream,
        )
