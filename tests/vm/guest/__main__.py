"""Run one case in the guest: `python -m tests.vm.guest CASE [ARGUMENT]…`; its name is `module.function`."""

from __future__ import annotations

import importlib
import sys
import traceback

from tests.vm.guest.lab import Lab

if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(".")
    lab = Lab()
    try:
        getattr(importlib.import_module(f"tests.vm.guest.{module}"), function)(lab, *sys.argv[2:])
    except Exception:
        lab.check("the case ends", holds=False, detail=traceback.format_exc())
        lab.check("the log's end", holds=False, detail=lab.now())
    sys.exit(0 if lab.is_well else 1)
