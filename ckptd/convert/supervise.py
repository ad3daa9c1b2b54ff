"""The API of conversion for the daemon and the command line (docs/design.md §4)."""

from __future__ import annotations

from ckptd.convert.inspection import inspect_files, probe_restrictions
from ckptd.convert.options import ConvertOptions, ConvertProgress, ConvertReport

__all__ = ["ConvertOptions", "ConvertProgress", "ConvertReport", "inspect_files", "probe_restrictions"]
