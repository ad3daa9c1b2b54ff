"""Defects that are put into ckptd one at a time: each must be found by a test (docs/faults.md)."""
