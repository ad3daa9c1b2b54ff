"""`python -m examples.demo.judge DIR`: decides whether every promise held. Not ckptd's code, no torch.

Reads what trainer, observer and quickstart wrote below DIR, and the bytes in the remote as they are now;
prints a line per promise, writes DIR/verdict.json; exit 0 only if every promise was checked and held, else 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from examples.demo.evidence import load
from examples.demo.promises import judge

SHOWN_FAILURES = 3


def main(argv: list[str] | None = None) -> int:
    """Judge the quickstart in the directory given."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not (Path(arguments[0]) / "plan.json").is_file():
        print("usage: python -m examples.demo.judge DIR    (as kept by `python -m examples.demo --keep DIR`)")
        return 2
    root = Path(arguments[0])
    verdicts = judge(load(root))
    for verdict in verdicts:
        mark = "held  " if verdict.held else "BROKEN"
        note = f"  ({verdict.note})" if verdict.note else ""
        print(f"{mark} {verdict.promise:4} {verdict.text:55} {verdict.checked:5} {verdict.unit}{note}")
        for failure in verdict.failures[:SHOWN_FAILURES]:
            print(f"         {failure}")
        if len(verdict.failures) > SHOWN_FAILURES:
            print(f"         … and {len(verdict.failures) - SHOWN_FAILURES} more")
    ok = all(verdict.held for verdict in verdicts)
    document = {"ok": ok, "promises": [asdict(v) | {"held": v.held} for v in verdicts]}
    (root / "verdict.json").write_text(json.dumps(document, indent=2) + "\n")
    print("every promise held" if ok else "NOT every promise held")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
