"""Define the options, the progress and the report of a conversion (docs/design.md §4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from ckptd.base.humanize import printable, size_of
from ckptd.errors import UsageError

Form = Literal["universal", "weights", "dcp"]
Dtype = Literal["fp32", "bf16", "fp16"]
Compat = Literal["auto", "strict", "superset"]
FormName = Literal["universal", "weights-fp32", "weights-bf16", "weights-fp16", "dcp"]
"""The forms that can be made, as every verb, the configuration and the Python API spell them."""
MIB = 1 << 20


def parse_form(name: str, dtype: str = "") -> tuple[Form, Dtype]:
    """Split the name of a form that can be made into its kind and element type.

    `weights` beside a `dtype` is the spelling of 0.1, taken until the release after 0.2.

    Raises:
        UsageError: there is no such form, or it is not made by a conversion.
    """
    if dtype and dtype not in get_args(Dtype):
        raise UsageError(f"--dtype {dtype!r} is none of {', '.join(get_args(Dtype))}")
    if name == "weights":
        name = f"weights-{dtype or 'fp32'}"
    elif dtype and name != f"weights-{dtype}":
        msg = f"--dtype is of weights, not of {name}"
        raise UsageError(msg, hint=f"leave it out, or say --form weights-{dtype}")
    if name == "zero":
        raise UsageError(
            "convert makes no ZeRO form", hint="`ckptd restore --form zero` fetches a committed one"
        )
    if name not in get_args(FormName):
        msg = f"there is no form {name!r} to convert to"
        raise UsageError(msg, hint=f"--form {', '.join(get_args(FormName))}")
    kind, _, element = name.partition("-")
    return cast("Form", kind), cast("Dtype", element or "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Hold the options of a conversion; sizes in bytes.

    Raises:
        UsageError: there is no such form, element type or layout, or a size that nothing fits in.
    """

    form: Form = "universal"
    dtype: Dtype = "fp32"
    """Element type of exported weights; fp32 is the master as it is."""
    max_shard_bytes: int = 5_000_000_000
    """Largest file of exported weights, and of dcp; a larger tensor gets one of its own."""
    compat: Compat = "auto"
    """Layout: strict = what the stock converter writes; superset = loads in stages 1, 2 and 3."""
    memory_budget_bytes: int = 512 * MIB
    """Bounds the memory of children and the page cache that they dirty."""
    verify: bool = False
    """Read the source's CRCs first, and compare the output with the plan before it is published."""
    reserve_bytes: int = 0
    """Refuse or stop when the write would leave less free than this; clones cost almost nothing."""
    strict: bool = True
    """Refuse patterns of tensor parallelism that match no parameter."""
    compare_masters: bool = True
    """Refuse masters that do not round to the model's weights; False: for trainers that change those."""
    low_priority: bool = True
    bytes_per_second: int | None = None
    """Copy and compare no more than this; None: as fast as it goes. Clones cost nothing."""
    write_latest: bool = False
    """Write `latest_universal` beside the destination (the stock converter does; never for weights)."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("form", self.form, get_args(Form)),
            ("dtype", self.dtype, get_args(Dtype)),
            ("compat", self.compat, get_args(Compat)),
        ):
            if value not in known:
                raise UsageError(f"there is no {name} {value!r}", hint=f"one of {', '.join(known)}")
        if self.max_shard_bytes < 1:
            msg = f"no file is as small as {self.max_shard_bytes} bytes"
            raise UsageError(msg, hint="give max_shard_bytes, for example 5_000_000_000")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertProgress:
    """Report the progress of a conversion; bytes are of output files."""

    phase: Literal["planning", "verifying", "copying", "publishing"]
    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int
    bytes_cloned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """Report the work of a cluster's workers; bytes are of sources."""

    workers: int
    tasks: int
    tasks_again: int
    """Asked for again after an error that may pass; what dask does again after a lost worker is not in it."""
    bytes_read: int
    bytes_local: int
    """Part of `bytes_read`: from the disks of the workers that read it, not from SRC."""
    bytes_needed: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertReport:
    """Report the result of a finished conversion."""

    destination: Path | str
    """A URL when it lies in a remote."""
    form: str
    """universal, weights-fp32, weights-bf16, weights-fp16 or dcp."""
    layout: str
    files: int
    bytes: int
    bytes_cloned: int
    bytes_copied: int
    parameters: int
    step: int | None
    plan_sha256: str
    resumed_files: int
    """Files that an earlier, killed attempt had finished."""
    seconds: float
    peak_rss_bytes: int
    """Largest resident set of the children."""
    verified: bool
    compared_tensors: int = 0
    """Tensors whose masters were compared with the model's own weights, all equal, and their elements."""
    compared_elements: int = 0
    not_compared: tuple[str, ...] = ()
    """Trained tensors that were not: how many, and why."""
    notes: tuple[str, ...] = ()
    """Differences that a resumed run will find (optimizer state that a loader leaves out); of weights,
    tensors stored once under another name or left out by the save."""
    cluster: ClusterReport | None = None

    def __repr__(self) -> str:
        """Say what was made, where, and what to know of it."""
        made = f"{self.files} files, {size_of(self.bytes)} in {self.seconds:.2f} s"
        lines = [
            f"{self.form} of step {'?' if self.step is None else self.step} in {self.destination}",
            f"  {made}, {'verified' if self.verified else 'not verified'}",
            *(f"  {note}" for note in self.notes),
        ]
        return "\n".join(map(printable, lines))
