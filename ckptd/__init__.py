"""ckptd keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated.

`ckptd.inspect`, `convert`, `checkpoints`, `verify`, `restore` and `resume` do what the commands of these names
do (`ckptd.api`).
"""

__version__ = "0.2.0"

__all__ = ["__version__", "checkpoints", "convert", "inspect", "restore", "resume", "verify"]


def __getattr__(name: str) -> object:
    """Load a function of the API when it is asked for: the daemon and `ckptd status` never do."""
    if name not in __all__:
        raise AttributeError(f"module 'ckptd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("ckptd.api"), name)
