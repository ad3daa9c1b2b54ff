"""Record people's decisions and what a first start found: a file with the state, an object in each remote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from ckptd.base.names import ROOT, decode_name, encode_name
from ckptd.core.model.manifest import Document, Many, parse, side_key
from ckptd.errors import DocumentDamaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PINS = ("pin", "unpin")
"""One subject for each tag: of these words the newest counts. All others add to what was said before."""


Kind = Literal["pin", "unpin", "accept", "adopt", "first-start"]


class Decision(Document):
    """Record a decision of a person. The newest `serial` of a subject counts.

    `unpin` is `ckptd pin --remove`, `adopt` is `ckptd accept --existing`: remotes keep the older words.
    """

    kind: Kind
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


def folder_of(kind: Kind) -> Literal["pins", "decisions"]:
    """Return the folder of such decisions in a remote."""
    return "pins" if kind in PINS else "decisions"


def key_of(decision: Decision) -> str:
    """Return its key in a remote."""
    name = f"{decision.kind}~{encode_name(decision.tag)}~{decision.serial}"
    return side_key(folder_of(decision.kind), name)


def named_in(key: str) -> Decision | None:
    """Return what a key in a remote tells: kind, tag and serial, all that counts of a pin or unpin."""
    folder, _, name = key.rpartition("/")
    parts = name.removesuffix(".json").split("~")
    if len(parts) != 3 or parts[0] not in get_args(Kind) or not parts[2].isdecimal():
        return None
    found = Decision(kind=parts[0], tag=decode_name(parts[1]), serial=int(parts[2]))  # type: ignore[arg-type]
    return found if folder == f"{ROOT}/{folder_of(found.kind)}" else None


def parse_decision(data: bytes, key: str) -> Decision:
    """Read a decision of a remote.

    Raises:
        DocumentDamaged: it is none, or another than its key says. RefusedError: of a newer major of ckptd.
    """
    return checked(parse(Decision, data, key), key)


def checked(decision: Decision, key: str) -> Decision:
    """Return a decision that lies under its own key.

    Raises:
        DocumentDamaged: it is another than the key says.
    """
    if key_of(decision) != key:
        msg = f"{key} is a decision on {decision.tag}, serial {decision.serial}: not what its name says"
        raise DocumentDamaged(msg, hint="it was edited, or it rots")
    return decision


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
