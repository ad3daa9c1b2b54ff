"""Every seeded defect still applies to the tree as it is, and says all that the runner asks of it."""

from __future__ import annotations

import re
import shlex

from tests.seeded.bugs import ROOT, applies, bugs


def test_every_patch_applies_and_names_its_test() -> None:
    known = bugs()
    assert len(known) >= 25
    numbers = [int(bug.number) for bug in known]
    assert numbers == sorted(set(numbers))
    assert applies([bug.patch for bug in known]) == ""
    for bug in known:
        re.compile(bug.reason)
        assert re.search(r"\b[PH]\d", bug.promise), bug.name
        files = [word for word in shlex.split(bug.tests) if word.startswith("tests/")]
        assert files, bug.name
        assert all((ROOT / name).exists() for name in files), bug.name
        changed = re.findall(r"^\+\+\+ b/(\S+)", bug.patch.read_text(), re.MULTILINE)
        assert changed, bug.name
        assert all(name.startswith("ckptd/") for name in changed), bug.name
