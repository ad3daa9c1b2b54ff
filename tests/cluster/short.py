"""`ckptd` with less patience: `short.py SECONDS ARGUMENTS…`.

Replicas are left to their owner for so long, and what goes from a remote to each node in turn. A folder is in
flight for `SHORT_SAVE` seconds after its last change.
"""

from __future__ import annotations

import os
import sys

from ckptd.cli.main import main
from ckptd.core.completeness import missing
from ckptd.core.policy import remote
from ckptd.daemon.intake import sealer
from ckptd.daemon.uploads import uploads

if __name__ == "__main__":
    seconds = float(sys.argv.pop(1))
    uploads.STEP_IN_SECONDS = missing.INCOMPLETE_SECONDS = remote.TURN_SECONDS = seconds
    missing.SLOW_SECONDS = 3 * seconds
    if "SHORT_SAVE" in os.environ:
        sealer.IN_FLIGHT_SECONDS = float(os.environ["SHORT_SAVE"])
    main()
