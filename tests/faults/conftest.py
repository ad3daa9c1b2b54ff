"""What takes a minute of real time runs with CKPTD_FULL=1 alone (`make faults-full`)."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("CKPTD_FULL") else ["test_transfer_daemon.py"]
