"""Benchmarks: real checkpoints, real tools, interleaved runs, medians with their spread."""
