# SPDX-License-Identifier: Apache-2.0
"""The one place the version is written; the build reads it from here."""

__version__ = "0.1.0"
