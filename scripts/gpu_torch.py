# SPDX-License-Identifier: Apache-2.0
"""Says why torch cannot use this machine's NVIDIA GPU, with status 1; silent, with status 0, where it can."""

from __future__ import annotations

import sys

import torch


def reason() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA. "
            "Install a CUDA build of the same version (README.md, 'Which torch'), or name an environment "
            "that has one with PYTHON=<python>."
        )
    try:
        torch.cuda.init()
    except Exception as error:  # whatever torch says is the reason
        return f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use it: {error}"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU (CUDA_VISIBLE_DEVICES?)"


if __name__ == "__main__":
    why = reason()
    if why is not None:
        print(f"an NVIDIA GPU is here, but {why}")
    sys.exit(why is not None)
