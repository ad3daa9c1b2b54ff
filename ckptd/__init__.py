"""ckptd keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated."""

__version__ = "0.2.0"
