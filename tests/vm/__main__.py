"""`make vm`: each case in a guest of its own, judged from outside of ckptd; prints a table.

What held with this very code is not run again, so a run that was cut goes on (`--anew` forgets it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.support.resumable import digest
from tests.vm.image import BUILD, ROOT
from tests.vm.machine import boot

SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Case:
    """A function of tests/vm/guest; `then`: one that is run after a reboot with the same disks."""

    name: str
    argument: str = ""
    then: str = ""

    @property
    def title(self) -> str:
        """As it is chosen and printed."""
        return f"{self.name} {self.argument}".strip()


NFS = ("life", "hang", "stale", "squash", "full", "quota", "nodes")
CASES = (
    *(Case(f"nfs.{name}", version) for version in ("4.2", "3") for name in NFS),
    Case("service.install", then="service.again"),
    Case("service.hang"),
    Case("disk.node"),
    Case("disk.remote"),
)


def run(case: Case) -> tuple[bool, str]:
    """Boot and run a case; whether all held, and its rows of the table."""
    begun = time.monotonic()
    arguments = (case.argument,) if case.argument else ()
    try:
        said = boot(case.name, *arguments, seconds=SECONDS)
        if case.then:
            said += boot(case.name, *arguments, seconds=SECONDS, again=case.then)
    except subprocess.TimeoutExpired:
        said = "the guest did not end in time"
    looks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    ends = said.count("ended with 0") == (2 if case.then else 1)
    rows = [f"{case.title}: {len(looks)} looks, {time.monotonic() - begun:.0f} s{'' if ends else ', FAILED'}"]
    rows += [
        f"  {'holds ' if look['holds'] else 'FAILED'}  {look['what']}: {look['detail']}" for look in looks
    ]
    if not looks or not ends:
        rows.append(said[-2000:])
    return ends and bool(looks), "\n".join(rows)


def main() -> int:
    """Run the cases; exit 1 when something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.vm")
    parser.add_argument(
        "cases", nargs="*", help="words that a case's name has, as in: nfs 4.2 service; default all"
    )
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--anew", action="store_true")
    args = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("the guest's disk is made by debootstrap and mounts, which needs root")
    finished = BUILD / f"finished-{digest(ROOT)}"
    if args.anew:
        finished.unlink(missing_ok=True)
    done = finished.read_text().splitlines() if finished.exists() else []
    chosen = [c for c in CASES if not args.cases or any(word in c.title for word in args.cases)]
    until, failed = time.monotonic() + 60 * args.minutes, []
    left = [case for case in chosen if case.title not in done]
    while left and time.monotonic() < until:
        case = left.pop(0)
        holds, text = run(case)
        print(text, flush=True)
        if holds:
            with finished.open("a") as out:
                out.write(f"{case.title}\n")
        else:
            failed.append(case.title)
    held = len(chosen) - len(left) - len(failed)
    print(f"{held} of {len(chosen)} cases held; failed: {failed or 'none'}; not reached: {len(left)}")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
