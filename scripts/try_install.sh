#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# try_install.sh PYTHON FILE: installs a wheel or a source archive into a folder of its own, away from the checkout, and
# makes a call through it. An archive is built without kernels (CONVT3D_CUDA=0): whether they compile, `make wheel` says.
set -eu
python=$1
file=$(readlink -f "$2")
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
cd "$target"
CONVT3D_CUDA=0 "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --target "$target/site" "$file"
PYTHONPATH="$target/site" "$python" - "$target" <<'PYTHON'
import sys
from pathlib import Path

import torch

import convt3d

assert Path(convt3d.__file__).is_relative_to(sys.argv[1]), f"another convt3d was found: {convt3d.__file__}"
x, weight, add = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, 2, 2, 2), torch.randn(2, 6, 6, 8, 10)
result = convt3d.conv_transpose3d(x, weight, stride=2, add=add, activation="relu")
expected = torch.relu(torch.nn.functional.conv_transpose3d(x.double(), weight.double(), stride=2) + add.double())
torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
library = Path(convt3d.__file__).parent / "_lib" / "libconvt3d.so"
print(f"convt3d {convt3d.__version__}, {'with' if library.is_file() else 'without'} kernels, installs and runs")
PYTHON
