"""ckptd keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated."""

__version__ = "0.1.0"
