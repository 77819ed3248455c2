# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d``."""

import sys

from .cli import main

sys.exit(main())
