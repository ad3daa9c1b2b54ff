"""The stock converter and a comparison with it, run in a child that may import torch and deepspeed.

`python -m tests.support.stock convert '[[source, destination], …]'` runs `ds_to_universal` on each pair;
`… try` does the same, and prints a JSON list with the error of each pair, null where there was none;
`python -m tests.support.stock compare '[[stock, ours], …]'` prints a JSON list of differences per pair:
files, keys, key order, types, shapes, strides and every byte of every tensor.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.real import run_module


def convert(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Convert each (source, destination) with the stock converter, one start for all."""
    _child("convert", pairs)


def try_convert(pairs: Sequence[tuple[Path, Path]]) -> list[str | None]:
    """Convert each pair; return the converter's error for each, None where it went through."""
    found: list[str | None] = json.loads(_child("try", pairs).splitlines()[-1])
    return found


def differences(pairs: Sequence[tuple[Path, Path]]) -> list[list[str]]:
    """What differs in each (stock, ours), empty when nothing does; `ckptd.json` is not counted."""
    found: list[list[str]] = json.loads(_child("compare", pairs).splitlines()[-1])
    return found


def _child(verb: str, pairs: Sequence[tuple[Path, Path]]) -> str:
    return run_module("tests.support.stock", verb, json.dumps([[str(a), str(b)] for a, b in pairs]))


def _convert_all(pairs: list[list[str]]) -> None:
    for source, destination in pairs:
        _convert(source, destination)


def _convert(source: str, destination: str) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        Namespace(
            input_folder=source,
            output_folder=destination,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def _error_of(source: str, destination: str) -> str | None:
    try:
        _convert(source, destination)
    except (Exception, SystemExit) as error:
        said = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {said[-1]}"[:300]
    return None


def _compare(stock: Path, ours: Path) -> list[str]:
    import torch

    theirs, made = _files(stock), _files(ours) - {"ckptd.json"}
    found = [f"only stock writes {name}" for name in sorted(theirs - made)]
    found += [f"only ckptd writes {name}" for name in sorted(made - theirs)]
    for name in sorted(theirs & made):
        a = torch.load(stock / name, weights_only=False)
        b = torch.load(ours / name, weights_only=False)
        _differ(a, b, name, found)
    return found


def _files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def _differ(a: Any, b: Any, where: str, found: list[str]) -> None:
    import torch

    if type(a) is not type(b):
        found.append(f"{where}: {type(a).__name__} became {type(b).__name__}")
    elif torch.is_tensor(a):
        if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride() or _raw(a) != _raw(b):
            found.append(f"{where}: tensors differ")
    elif isinstance(a, dict):
        if list(a) != list(b):
            found.append(f"{where}: keys {list(a)} became {list(b)}")
        for key in a.keys() & b.keys():
            _differ(a[key], b[key], f"{where}/{key}", found)
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            found.append(f"{where}: {len(a)} items became {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            _differ(x, y, f"{where}[{i}]", found)
    elif type(a).__module__.startswith("deepspeed") and not isinstance(a, int):
        _differ(vars(a), vars(b), where, found)
    elif a != b:
        found.append(f"{where}: {a!r} became {b!r}")


def _raw(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if sys.argv[1] == "convert":
        _convert_all(given)
    elif sys.argv[1] == "try":
        print("\n" + json.dumps([_error_of(*pair) for pair in given]))
    else:
        print(json.dumps([_compare(Path(a), Path(b)) for a, b in given]))
