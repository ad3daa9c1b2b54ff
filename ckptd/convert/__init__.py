"""Conversion as a permutation of bytes: plan, execute, supervise (docs/design.md §4)."""
