"""Known vulnerabilities of what is installed: pip-audit over an environment (`make audit`), in plain words.

Where the service with the advisories does not answer, that is said and nothing is claimed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 300


def verdict(answer: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit status and lines for pip-audit's JSON."""
    rows = answer["dependencies"]
    bad = [(row["name"], row["version"], v) for row in rows for v in row.get("vulns", [])]
    unknown = [row["name"] for row in rows if "skip_reason" in row]
    lines = [
        f"{name} {version}: {v['id']}, fixed in {', '.join(v['fix_versions']) or 'no version yet'}"
        for name, version, v in bad
    ]
    if bad:
        return 1, lines
    if len(unknown) == len(rows):
        return 0, [f"skipped: the service knows none of {len(rows)} packages, so nothing was audited"]
    not_asked = f"; not known to the service: {', '.join(unknown)}" if unknown else ""
    return 0, [f"{len(rows) - len(unknown)} packages, no known vulnerability{not_asked}"]


def main(tool: str, packages: str) -> int:
    """Audit the packages in a site-packages folder."""
    command = [tool, "--format", "json", "--progress-spinner", "off", "--path", packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"skipped: no answer within {SECONDS} s")
        return 0
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"skipped: the advisory service does not answer ({last[:200]})")
        return 0
    status, lines = verdict(answer)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} is not there")
    sys.exit(main(*sys.argv[1:3]))
