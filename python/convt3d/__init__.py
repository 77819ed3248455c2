# SPDX-License-Identifier: Apache-2.0
"""3D transposed convolution fused with bias, add and activation, for PyTorch.

``y = act(conv_transpose3d(x, w) + bias + add)`` as one operation: see :func:`conv_transpose3d`.
"""

from . import _flops  # noqa: F401 (registers formulas)
from ._cat import conv_transpose3d_cat
from ._explain import Explanation, explain
from ._functional import conv_transpose3d
from ._fuse import FuseEntry, FuseReport, fuse, fuse_report, unfuse
from ._include_paths import include_paths
from ._inductor import disable_inductor, enable_inductor
from ._version import __version__
from .modules import FusedConvTranspose3d, ModelNew
from .reference import Model

__all__ = [
    "Explanation",
    "FuseEntry",
    "FuseReport",
    "FusedConvTranspose3d",
    "Model",
    "ModelNew",
    "__version__",
    "conv_transpose3d",
    "conv_transpose3d_cat",
    "disable_inductor",
    "enable_inductor",
    "explain",
    "fuse",
    "fuse_report",
    "include_paths",
    "unfuse",
]
