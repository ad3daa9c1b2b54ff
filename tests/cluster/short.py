"""`ckptd` with less patience: `short.py SECONDS ARGUMENTS…` leaves replicas to their owner for so long."""

from __future__ import annotations

import sys

from ckptd.cli.main import main
from ckptd.core import missing
from ckptd.daemon import shipping

if __name__ == "__main__":
    shipping.STEP_IN_SECONDS = missing.INCOMPLETE_SECONDS = float(sys.argv.pop(1))
    missing.SLOW_SECONDS = 3 * missing.INCOMPLETE_SECONDS
    main()
