"""`ckptd` with less patience: `short.py SECONDS ARGUMENTS…`.

Replicas are left to their owner for so long, and what goes from a remote to the node that is drawn.
"""

from __future__ import annotations

import sys

from ckptd.cli.main import main
from ckptd.core import keeping_remote, missing
from ckptd.daemon import shipping

if __name__ == "__main__":
    seconds = float(sys.argv.pop(1))
    shipping.STEP_IN_SECONDS = missing.INCOMPLETE_SECONDS = keeping_remote.TURN_SECONDS = seconds
    main()
