"""Record people's decisions and what a first start found: a file with the state, an object in each remote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ckptd.base.names import decode_name, encode_name, name_problem, shown
from ckptd.core.model.manifest import Document, Many, parse, side_key
from ckptd.errors import DocumentDamaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PINS = ("pin", "unpin")
"""One subject for each tag: of these words the newest counts. All others add to what was said before."""


class Decision(Document):
    """Record a decision of a person. The newest `serial` of a subject counts.

    `unpin` is `ckptd pin --remove`, `adopt` is `ckptd accept --existing`: remotes keep the older words.
    """

    kind: Literal["pin", "unpin", "accept", "adopt", "first-start"]
    tag: str
    """`*` = every checkpoint found at the first start (adopt)."""
    fingerprints: Many[tuple[str, str]] = ()
    """Shards of the save that is meant, where it matters (accept)."""
    tags: Many[str] = ()
    """first-start: the tags found then."""
    committed: Many[str] = ()
    """first-start: those of them that had a COMMIT then: what it lists was not found, a resume brought it."""
    place: str = ""
    """first-start: of which directory (a digest of path and inode); empty: of a release that noted none."""
    adopted: Many[str] = ()
    """first-start: when each `adopt` was said that was known then: those were of what others had found."""
    by: str = ""
    at: str = ""
    serial: int = 0


def decision_file(decision: Decision) -> str:
    """Return the name of its file: here and in a remote, kind, tag and serial."""
    return f"{decision.kind}~{encode_name(decision.tag)}~{decision.serial}.json"


def decision_key(decision: Decision) -> str:
    """Return its key in a remote."""
    folder: Literal["pins", "decisions"] = "pins" if decision.kind in PINS else "decisions"
    return side_key(folder, decision_file(decision).removesuffix(".json"))


def named_pin(file: str) -> Decision | None:
    """Return the pin of a file that cannot be read, by its name; None: the file is of another decision."""
    kind, _, rest = file.removesuffix(".json").partition("~")
    encoded, _, serial = rest.rpartition("~")
    tag = decode_name(encoded)
    if kind != "pin" or name_problem(tag) is not None:
        return None
    return Decision(kind="pin", tag=tag, serial=int(serial) if serial.isdecimal() and len(serial) < 30 else 0)


def check_key(decision: Decision, key: str) -> Decision:
    """Return a decision that lies under its own key.

    Raises:
        DocumentDamaged: it is another than the key says.
    """
    if decision_key(decision) != key:
        msg = f"{shown(key)} is a decision on {decision.tag}, serial {decision.serial}, unlike its name"
        raise DocumentDamaged(msg, hint="it was edited, or it rots")
    return decision


def parse_decision(data: bytes, key: str) -> Decision:
    """Read a decision of a remote.

    Raises:
        DocumentDamaged: it is none, or another than its key says. RefusedError: of a newer major of ckptd.
    """
    return check_key(parse(Decision, data, key), key)


def newest_decisions(decisions: Iterable[Decision]) -> dict[str, Decision]:
    """Tag → its newest pin or unpin."""
    newest: dict[str, Decision] = {}
    for decision in decisions:
        old = newest.get(decision.tag, decision)
        if decision.kind in PINS and decision.serial >= old.serial:
            newest[decision.tag] = decision
    return newest


def subject_of(decision: Decision) -> tuple[str, str]:
    """Return the subject of a decision: decisions on one subject have ascending serials."""
    return ("pin" if decision.kind in PINS else decision.kind), decision.tag


def lacking(words: Iterable[Decision], there: Iterable[Decision]) -> tuple[Decision, ...]:
    """Those of the words that a remote with these decisions is to be given, so that they count there too.

    A newer word there, an `unpin` by another node, is never overridden. Nor is one with a lower serial that
    was said after the same word there: serials are raised in each remote by what that one holds.
    """
    held: dict[tuple[str, str], list[Decision]] = {}
    for decision in there:
        held.setdefault(subject_of(decision), []).append(decision)
    return tuple(word for word in words if _lacks(word, held.get(subject_of(word), ())))


def _lacks(word: Decision, held: Sequence[Decision]) -> bool:
    is_said = any(one.model_copy(update={"serial": word.serial}) == word for one in held)
    if word.kind not in PINS:
        return not is_said
    newest = newest_decisions(held).get(word.tag)
    if newest is None or newest.serial >= word.serial:
        return newest is None
    # without a time it cannot be told from one that was said before
    return newest.kind == word.kind or not (is_said and word.at)


def pinned_tags(decisions: Iterable[Decision]) -> frozenset[str]:
    """Tags whose newest pin or unpin is a pin."""
    return frozenset(tag for tag, decision in newest_decisions(decisions).items() if decision.kind == "pin")
