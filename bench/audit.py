"""Known vulnerabilities of what is installed: pip-audit over an environment (`make audit`), in plain words.

Where the service with the advisories does not answer, that is said and nothing is claimed; a pip-audit that
ends without an answer for any other reason is a failure.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 300
_UNREACHED = re.compile(r"requests\.exceptions\.\w*(Connection|Proxy|SSL|Timeout|ChunkedEncoding)\w*\b")
"""The last line of a pip-audit that got through to nobody."""
_TIP = "your network may be blocking this service"
"""Its own last words then; the reason stands before them."""
_REFUSED = ("pip_audit._service.interface.ServiceError", "requests.exceptions.HTTPError: ")
"""Its last line where the service answers with an error, and how the line begins that says which."""


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


def unanswered(words: str) -> str | None:
    """Why the service did not answer, by what pip-audit said; None: it ended for another reason."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if _UNREACHED.match(last):
        return last
    if _TIP in last:
        return lines[-2] if len(lines) > 1 else last
    if last.startswith(_REFUSED[0]):
        return next((line for line in reversed(lines) if line.startswith(_REFUSED[1])), None)
    return None


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
        why = unanswered(done.stderr)
        if why is not None:
            print(f"skipped: the advisory service does not answer ({why[:200]})")
            return 0
        last = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-5:] or ["no output"]
        print("\n".join([f"pip-audit ended with {done.returncode} and no answer:", *last]))
        return 2
    status, lines = verdict(answer)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} is not there")
    sys.exit(main(*sys.argv[1:3]))
