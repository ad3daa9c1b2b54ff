"""Files made to hurt whoever opens them, and a canary that shows if any of their code ran (P14)."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

from tests.support.synthetic import write_archive

OPTIM = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"

MANY: dict[str, bytes] = {}
if os.environ.get("CKPTD_FULL"):  # sixty megabytes
    _KEYS = b"".join(b"J" + struct.pack("<I", i) + b"N" for i in range(10**7))
    MANY["ten million keys"] = b"\x80\x02}(" + _KEYS + b"u."


class Call:
    """Pickles as a call of a global."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function = function
        self.args = args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


def pickles(canary: Path) -> dict[str, bytes]:
    """Name → a hostile `data.pkl`."""
    import subprocess

    touch = f"touch {canary}"
    short = b"\x8c" + bytes([len(touch)]) + touch.encode()
    nested = Call(getattr, Call(__import__, "os"), "system")
    return MANY | {
        "os.system": pickle.dumps(Call(os.system, touch), 2),
        "os.system beside data": pickle.dumps(
            {"optimizer_state_dict": {"loss_scaler": Call(os.system, touch)}}, 2
        ),
        "subprocess": pickle.dumps(Call(subprocess.check_call, ["touch", str(canary)]), 4),
        "eval": pickle.dumps(Call(eval, f"open({str(canary)!r}, 'w')"), 2),
        "exec": pickle.dumps(Call(exec, f"open({str(canary)!r}, 'w')"), 3),
        "getattr nest": pickle.dumps([nested, Call(map, nested, [touch])], 4),
        "result of a call is called": b"\x80\x02cbuiltins\ngetattr\ncos\n__name__\n\x85R" + short + b"\x85R.",
        "inst": b"(V" + touch.encode() + b"\nios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + short + b"o.",
        "newobj": b"\x80\x02cos\nsystem\n" + short + b"\x85\x81.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",
        "setstate": b"\x80\x02cos\nsystem\n)R" + short + b"b.",
        "dict method by build": b"\x80\x02cbuiltins\ndict\n)R}\x8c\x0c__setstate__cos\nsystem\nsb"
        + short
        + b"b.",
        "extension registry": b"\x80\x02\x82\x01.",
        "persistent id": b"\x80\x02cos\nsystem\nQ.",
        "memo bomb": b"\x80\x02Nr" + struct.pack("<I", 0xFFFFFFFF) + b".",
        "memo bomb, many": b"\x80\x02"
        + b"".join(b"Nr" + struct.pack("<I", i << 8) for i in range(1 << 16))
        + b".",
        "bytes of 2^62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        "text of 2^62": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
        "negative long": b"\x80\x02\x8b" + struct.pack("<i", -5) + b".",
        "frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        "decimal of 4000 digits": b"I" + b"9" * 4000 + b"\n.",
        "endless line": b"V" + b"a" * 100_000 + b".",
        "laughs as key": b"\x80\x02)" + b"2\x86" * 64 + b"q\x00}h\x00K\x01s.",
        "laughs as key, few and wide": b"\x80\x02)q\x00"
        + (b"(" + b"h\x00" * 256 + b"tq\x00") * 5
        + b"}h\x00K\x01s.",
        "laughs as value": b"\x80\x02)" + b"2\x86" * 64 + b".",
        "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "deep tuples": b"\x80\x02)" + b"\x85" * 500_000 + b".",
        "deep tuple as key": b"\x80\x02})" + b"\x85" * 500_000 + b"K\x01s.",
        "deep dictionaries": b"\x80\x02" + b"}K\x00" * 100_000 + b"}" + b"s" * 100_000 + b".",
        "stack of nothing": b"\x80\x02" + b"]" * (20 << 20) + b".",
        "marks": b"\x80\x02" + b"(" * (4 << 20) + b".",
        "sets": b"\x80\x04" + b"\x8f" * (2 << 20) + b".",
        "endless": b"\x80\x02" + b"N0" * (8 << 20) + b"N.",
        "pops of nothing": b"\x80\x02" + b"0" * 1000 + b".",
        "marks popped": b"\x80\x02" + b"1" * 10 + b".",
    }


def write_hostile(folder: Path, data: bytes, name: str = OPTIM) -> Path:
    """An archive that looks like a shard and holds that pickle."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    write_archive(path, {"data.pkl": data, "byteorder": b"little", "version": b"3\n", "data/0": bytes(64)})
    return path
