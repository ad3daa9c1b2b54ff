"""ckptd keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated.

    import ckptd

    ckptd.restore("s3://bucket/run", "here").path

The functions are those of `ckptd.api`, the types what they return (docs/python.md). Each is imported where it
is first used: `import ckptd` loads nothing else.
"""

from __future__ import annotations

__version__ = "0.2.0"

TYPE_CHECKING = False
"""True for type checkers, by its name; `typing` is not loaded for it."""

if TYPE_CHECKING:
    from ckptd import errors
    from ckptd.api import checkpoints, convert, inspect, restore, resume, status, verify
    from ckptd.conversion.options import ConvertReport
    from ckptd.errors import CkptdError
    from ckptd.maintenance.inspection import InspectedCheckpoint, Inspection
    from ckptd.maintenance.listing import ListedCheckpoint, RemoteListing
    from ckptd.maintenance.status.fleet import NodeReport
    from ckptd.maintenance.status.report import (
        CheckpointReport,
        JobReport,
        ProblemReport,
        SafeReport,
        UploadReport,
    )
    from ckptd.maintenance.verify import Slice, VerifiedCommit, VerifiedRemote
    from ckptd.recover.recovery import Recovered

__all__ = [
    "CheckpointReport",
    "CkptdError",
    "ConvertReport",
    "InspectedCheckpoint",
    "Inspection",
    "JobReport",
    "ListedCheckpoint",
    "NodeReport",
    "ProblemReport",
    "Recovered",
    "RemoteListing",
    "SafeReport",
    "Slice",
    "UploadReport",
    "VerifiedCommit",
    "VerifiedRemote",
    "__version__",
    "checkpoints",
    "convert",
    "errors",
    "inspect",
    "restore",
    "resume",
    "status",
    "verify",
]

_HOMES = {
    "api": ("checkpoints", "convert", "inspect", "restore", "resume", "status", "verify"),
    "conversion.options": ("ConvertReport",),
    "errors": ("CkptdError",),
    "maintenance.inspection": ("InspectedCheckpoint", "Inspection"),
    "maintenance.listing": ("ListedCheckpoint", "RemoteListing"),
    "maintenance.status.fleet": ("NodeReport",),
    "maintenance.status.report": (
        "CheckpointReport",
        "JobReport",
        "ProblemReport",
        "SafeReport",
        "UploadReport",
    ),
    "maintenance.verify": ("Slice", "VerifiedCommit", "VerifiedRemote"),
    "recover.recovery": ("Recovered",),
}
"""Module → what it defines of `__all__`, as the imports above say for type checkers."""

if not TYPE_CHECKING:  # a type checker would take it to define every name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name == "errors":
            return import_module("ckptd.errors")
        for module, names in _HOMES.items():
            if name in names:
                found = getattr(import_module(f"ckptd.{module}"), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module 'ckptd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
