"""`python -m ckptd.recover.making_child`: a remote's child that also makes what it sends (docs/adr/0093).

Beside `ckptd.remote.child`, for one order: what executing a plan takes (numpy, buffers) goes with it.
"""

from __future__ import annotations

from ckptd.recover.making import opened
from ckptd.remote.child import main

if __name__ == "__main__":
    main(opened)
