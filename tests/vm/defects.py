"""Flushes that are left out on purpose: a rig of power cuts that finds none of them would prove nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.vm.image import ROOT

_DIRECTORY = "storage/stores/directory.py"
DEFECTS: dict[str, list[tuple[str, str]]] = {
    "folders": [("base/files.py", "    try:\n        os.fsync(fd)\n    except")],
    "documents": [
        ("base/files.py", "os.fsync(fd)\n        finally:\n            os.close(fd)\n        yield")
    ],
    "objects": [
        (_DIRECTORY, "os.fdatasync(fd)\n            extents.drop_pages(fd, flushed"),
        (_DIRECTORY, "os.fsync(fd)\n                extents.drop_pages"),
    ],
    "saves": [("storage/local/fs.py", "os.fdatasync(fd)\n        files.fsync_dir(folder)")],
    # the first two only start writing, which these fast disks finish before the next flush of anything
    "conversions": [
        ("conversion/engine/executor.py", "extents.start_flush(fd)"),
        ("conversion/engine/executor.py", "extents.drop_pages(fd)"),
        ("conversion/engine/executor.py", 'os.fsync, name="flush"'),
        ("conversion/engine/executor.py", "extents.flush_range(fd, stripe.at, stripe.nbytes)"),
    ],
}
"""Name → (file of ckptd, text around the one call that is left out)."""
_CALL = re.compile(r"os\.fdatasync|os\.fsync|extents\.\w+\(.*?\)")


def plant(name: str, folder: Path) -> Path:
    """Make a copy of ckptd with the defect; returns the folder that goes on PYTHONPATH."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "ckptd", folder / "ckptd", ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in DEFECTS[name]:
        path = folder / "ckptd" / file
        whole = path.read_text()
        if whole.count(text) != 1:
            raise SystemExit(f"the defect {name} does not fit {file} any more")
        path.write_text(whole.replace(text, _CALL.sub("os.fstat", text)))
    return folder
