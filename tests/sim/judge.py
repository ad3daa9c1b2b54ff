"""Judges a life from the world's own books, never by ckptd's code: documents are plain JSON here.

It stands behind the kernel's calls (what is removed, moved, written, uploaded) and looks at the remotes
between steps and after every crash. What it raises names the promise that was broken (docs/design.md §2).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.decisions import Belt, Rules
from tests.sim.trainer import SAVE_DIR, Save, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tests.sim.disk import Inode

OURS = "_ckptd"
PERMIT_SECONDS = 60.0
_AUDITED = {
    SAVE_DIR: "prune",
    f"{SAVE_DIR}/{OURS}/hold": "release-hold",
}
"""Where what is whole lies on the node, and what audit.jsonl calls its removal."""


class Broken(BaseException):
    """A promise was broken; the text begins with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A COMMIT that counts, and the save whose bytes it lists."""

    key: str
    sha256: str
    tag: str
    folder: str
    run_id: str
    order: tuple[int, int, int]
    save: int
    objects: frozenset[str]


class Judge:
    """Of one life. `remotes` give every object of a remote as it truly is: key → (signature, content)."""

    def __init__(
        self,
        trainer: Trainer,
        remotes: Mapping[str, Callable[[], dict[str, tuple[object, bytes]]]],
        required: frozenset[str],
        history: list[str],
        rules: Rules,
        clock: Callable[[], float],
        audit: Callable[[], bytes],
        others: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        self.trainer = trainer
        self._others = others
        """Remote → what another run committed there: nothing that the life's daemon does concerns it."""
        self.removed: dict[int, int] = {}
        """Save → how many of its files ckptd removed, each rightly."""
        self.removed_at: list[float] = []
        """When saves went, of all lives of the daemon: its hourly limit outlives a start."""
        self.protected: set[int] = set()
        """Saves that were there before ckptd first ran and are not adopted."""
        self.pinned: dict[str, set[int]] = {}
        """Tags of pins that returned 0, and saves whose removal was under way when they came."""
        self.maybe_pinned: set[str] = set()
        """Tags of pins and unpins that did not return 0 as well."""
        self.rules = rules
        self.clock = clock
        """Seconds of this life, which no crash sets back."""
        self.belt = Belt()
        self._rules_until: list[tuple[float, Rules]] = []
        """Earlier rules, and when they ended."""
        self._before: dict[str, dict[str, Live]] = {name: {} for name in remotes}
        """COMMITs at the last look."""
        self._pinned_before: frozenset[str] = frozenset()
        self.being_read: set[tuple[str, str]] = set()
        """(remote, COMMIT) of what somebody reads there, under a lease that was there before its removal."""
        self._looked_seconds = 0.0
        self._known_finished: set[int] = set()
        self._aside: set[int] = set()
        """Saves that were renamed aside to be removed."""
        self.without_loss: set[str] = set()
        """Tags of which ckptd may have no value of the metric, or that of another save."""
        self._has_losses = True
        """No power cut took a line of the trainer's losses yet."""
        self.first_ever: dict[str, dict[str, str]] = {name: {} for name in remotes}
        self.ever: dict[str, set[int]] = {name: set() for name in remotes}
        """Saves that were committed there at some time."""
        self.highest: dict[tuple[str, str], tuple[int, int, int]] = {}
        """(remote, run) → the order of its newest COMMIT."""
        self.unordered: set[int] = set()
        """Saves that were committed nowhere when the journal was lost: only their steps order them (P8)."""
        self.is_order_open = False
        """The journal was lost while lists hid COMMITs: the rewinds that only these tell of are known to
        nobody, and what was saved since has the order of the branch before. How many stay is judged."""
        self.spoiled: set[str] = set()
        """Remotes that lost a COMMIT by somebody else's hand: what is claimed of them is out of date."""
        self.was_stale = False
        """A list may have hidden a COMMIT: what it is of counts as not committed for as long."""
        self.vouched: dict[tuple[str, int], float] = {}
        """(remote, save) → when it was there as ckptd asked for it last: good for one permit."""
        self._audit = audit
        self._told: Counter[tuple[str, str]] = Counter()
        """(what, tag) → removals that had a line of their own in audit.jsonl."""
        self._remotes = remotes
        self._required = required
        self._history = history
        self._parsed: dict[bytes, Any] = {}
        self._matched: dict[tuple[object, ...], Live] = {}

    def say(self, promise: str, text: str) -> None:
        """A promise was broken."""
        self._history.append(f"BROKEN {promise}: {text}")
        raise Broken(f"{promise}: {text}")

    # --- the remote ------------------------------------------------------------------------------------

    def live(self, name: str) -> list[Live]:
        """COMMITs of the life's runs that count in a remote; each holds the bytes of one save (P3, P4)."""
        held, others = self._remotes[name](), self._others.get(name, {})
        found = []
        for key in sorted(k for k in held if k.startswith(f"{OURS}/commits/") and k not in others):
            stem = key.rsplit("/", 1)[1]
            if "~x" in stem or f"{OURS}/retired/{stem}" in held or f"{OURS}/disputes/{stem}" in held:
                continue
            found.append(self._proved(name, key, held))
            self.ever[name].add(found[-1].save)
        return found

    def _json(self, data: bytes, key: str) -> Any:
        if data not in self._parsed:
            try:
                self._parsed[data] = json.loads(data)
            except ValueError:
                self.say("P3", f"{key} is no whole document: {data[:40]!r}")
        return self._parsed[data]

    def _proved(self, name: str, key: str, held: dict[str, tuple[object, bytes]]) -> Live:
        data = held[key][1]
        commit = self._json(data, key)
        signature: list[object] = [name, key, data]
        listed: list[Any] = []
        for ref in commit["manifests"]:
            if ref["key"] not in held:
                self.say("P3", f"{name}: {key} rests on {ref['key']}, which is not there")
            listed.append((ref, held[ref["key"]]))
            signature.append(held[ref["key"]][0])
            for file in self._json(held[ref["key"]][1], ref["key"])["files"]:
                if file["key"] not in held:
                    self.say("P3", f"{name}: {key} lists {file['key']}, which is not there")
                signature.append(held[file["key"]][0])
        known = self._matched.get(tuple(signature))
        if known is None:
            known = self._matched[tuple(signature)] = self._compared(name, key, data, commit, listed, held)
        return known

    def _compared(
        self,
        name: str,
        key: str,
        data: bytes,
        commit: Any,
        listed: list[Any],
        held: dict[str, tuple[object, bytes]],
    ) -> Live:
        contents: dict[str, bytes] = {}
        objects: set[str] = set()
        for ref, (_, manifest) in listed:
            if hashlib.sha256(manifest).hexdigest() != ref["sha256"]:
                self.say("P3", f"{name}: {ref['key']} is not the manifest that {key} names")
            for file in self._json(manifest, ref["key"])["files"]:
                objects.add(file["key"])
                contents[file["path"]] = held[file["key"]][1]
                if len(contents[file["path"]]) != file["bytes"]:
                    self.say("P2", f"{name}: {file['key']} has another size than {ref['key']} says")
        alike = [
            save
            for save in self.trainer.saves
            if save.tag == commit["tag"] and all(contents.get(p) == d for p, d in save.files.items())
        ]
        if not alike:
            self.say("P4", f"{name}: {key} holds the bytes of no single save of {commit['tag']}")
        return Live(
            key=key,
            sha256=hashlib.sha256(data).hexdigest(),
            tag=commit["tag"],
            folder=commit["folder"],
            run_id=commit.get("run_id") or commit["job_id"],
            order=(commit["branch"], commit["step"], commit["save_seq"]),
            save=alike[-1].number,
            objects=frozenset(objects),
        )

    def holds(self, name: str, save: Save) -> bool:
        """The remote holds the very bytes of a save under a COMMIT that counts."""
        return any(live.save == save.number for live in self.live(name))

    def asked(self, name: str, commits: Iterable[tuple[str, str]], now_seconds: float) -> None:
        """ckptd reads COMMITs afresh: what is truly there now may vanish and be removed here all the same."""
        wanted = set(commits)
        for live in self.live(name):
            if (live.key, live.sha256) in wanted:
                self.vouched[name, live.save] = now_seconds

    # --- behind every call -----------------------------------------------------------------------------

    def on_removal(self, inode: Inode, path: str, now_seconds: float) -> None:
        """ckptd unlinks a trainer's file (P1, P5)."""
        assert inode.saved is not None
        if inode.saved[0] == 0:
            self._on_late_removal(inode, path)
            return
        save = self.trainer.saves[inode.saved[0] - 1]
        if not save.is_finished:
            self.say("P5", f"{path} belongs to a save that is not complete")
        if bytes(inode.data) != save.files[inode.saved[1]]:
            self.say("P1", f"{path} is removed and is not what was saved")
        if save.number in self.protected and not save.is_rotated:
            self.say("P5", f"{path} was there before ckptd first ran")
        if save.tag in self.pinned and save.number not in self.pinned[save.tag]:
            self.say("P5", f"{path} is pinned")
        # one that is being overwritten right now was there when the permit was made
        newest = [
            s
            for s in self.trainer.saves
            if s.is_finished and (not s.is_gone or 0 <= now_seconds - s.gone_seconds < PERMIT_SECONDS)
        ]
        if newest and newest[-1].number == save.number and save.number not in self.unordered:
            self.say("P5", f"{path} belongs to the newest complete checkpoint")
        if not self._required:
            self.say("P1", f"{path} is removed though no remote is required")
        if save.number not in self.removed:
            modes = {rules.unuploaded for rules in self._rules_lately(PERMIT_SECONDS)}
            for name in sorted(self._required) if "delete" not in modes else ():
                enough = [save, *(self._later(save) if "thin" in modes else ())]
                if not any(self._may_rest_on(name, one, now_seconds) for one in enough):
                    self.say("P1", f"{path} is removed, and {name} does not hold save {save.number}")
            self.removed_at.append(self.clock())
        self.removed[save.number] = self.removed.get(save.number, 0) + 1

    def _may_rest_on(self, name: str, save: Save, now_seconds: float) -> bool:
        vouched_seconds = self.vouched.get((name, save.number), -PERMIT_SECONDS)
        is_permitted = now_seconds - vouched_seconds < PERMIT_SECONDS
        return self.holds(name, save) or (is_permitted and name in self.spoiled)

    def _later(self, save: Save) -> list[Save]:
        """Saves that count as newer, or may: by their step, or by times of a clock that was set back."""
        others = [s for s in self.trainer.saves if s is not save and s.is_finished]
        if self.is_order_open:
            return others
        return [
            s
            for s in others
            if s.number > save.number or s.step > save.step or s.written_ns > save.written_ns
        ]

    def _rules_lately(self, seconds: float) -> list[Rules]:
        """What the job file said in that time."""
        since = self.clock() - seconds
        return [self.rules, *(rules for until, rules in self._rules_until if until >= since)]

    def _leaves(self, tag: str, now_seconds: float) -> None:
        """A checkpoint is renamed aside, to be removed: nothing that people decided keeps it (P5)."""
        save = self.trainer.current(tag)
        if save is None or save.is_gone or not save.is_finished:
            return  # whether it may go at all is judged file by file
        now = self.clock()
        if tag in self.pinned:
            self.say("P5", f"{tag} leaves the node and is pinned")
        # what goes in one plan counts for what goes in it too
        going = {number for number, at in self.belt.gone_at.items() if now - at < PERMIT_SECONDS}
        later = {s.number for s in self._later(save)} | (self.unordered - {save.number})
        later -= self.removed.keys() - going
        lately = [s for s in self.trainer.saves if s.is_finished and s.number in later]
        newer = [s for s in lately if not s.is_gone or 0 <= now_seconds - s.gone_seconds < PERMIT_SECONDS]
        rules = self._rules_lately(PERMIT_SECONDS)
        # what a remote that does not list it holds is not known as committed, and goes where all may
        # nor is what was committed when the answer was lost, as long as nobody looked
        seen = {number for _, number in self.vouched}
        is_committed = save.number in seen and all(self.holds(name, save) for name in self._required)
        is_committed &= all(r.unuploaded != "delete" for r in rules) and not self.was_stale
        is_best = self._is_best(save)
        why = [
            r.local.why_kept(save.step, len(newer), is_committed=is_committed, is_best=is_best) for r in rules
        ]
        if all(why):
            self.say("P5", f"{tag} leaves the node, though the job file keeps it: {why[0]}")
        self._note_finished()
        self._aside.add(save.number)
        self.belt.gone_at[save.number] = now
        if self.belt.is_torn(max(r.local.limit or 0 for r in rules), now):
            self.say("P5", f"{tag} is one too many in an hour: {sorted(self.belt.gone_at)}")

    def _is_best(self, save: Save) -> bool:
        """No save ever had a lesser loss, and nothing can have told ckptd otherwise."""
        others = [s for s in self.trainer.saves if s is not save]
        is_known = self._has_losses and save.tag not in self.without_loss
        return is_known and all(s.loss > save.loss and s.step != save.step for s in others)

    def _note_finished(self) -> None:
        for save in self.trainer.saves:
            if save.is_finished and save.number not in self._known_finished:
                self._known_finished.add(save.number)
                self.belt.completed_at.append(self.clock())

    def _on_late_removal(self, inode: Inode, path: str) -> None:
        """A file that somebody put into a checkpoint: what it holds is listed under that name (P1)."""
        assert inode.saved is not None
        if {rules.unuploaded for rules in self._rules_lately(PERMIT_SECONDS)} != {"keep"}:
            return  # it may go with a checkpoint that no remote holds
        tag, _, name = inode.saved[1].partition("/")
        for remote in sorted(self._required):
            held = self._remotes[remote]()
            contents = [
                held[file["key"]][1]
                for key in held
                if key.startswith(f"{OURS}/commits/{tag}~")
                and key.rsplit("/", 1)[1].split("~")[2][:4] == "zero"
                for ref in self._json(held[key][1], key)["manifests"]
                for file in self._json(held[ref["key"]][1], ref["key"])["files"]
                if file["path"] == name and file["key"] in held
            ]
            if bytes(inode.data) not in contents and remote not in self.spoiled:
                self.say("P1", f"{path} is removed, and {remote} does not hold what it says")

    def on_move(self, inode: Inode, path: str, target: str, now_seconds: float) -> None:
        """ckptd renames: a checkpoint's folder goes to the trash or comes back, nothing else (P5, P15)."""
        if target.startswith(f"{SAVE_DIR}/{OURS}/trash/"):
            self._has_line(inode, path)
            if path.rpartition("/")[0] == SAVE_DIR:
                self._leaves(path.rpartition("/")[2], now_seconds)
        if _is_trainers(path) and not target.startswith(f"{SAVE_DIR}/{OURS}/trash/"):
            self.say("P5", f"{path} is renamed to {target}")
        if _is_trainers(target) and not path.startswith(f"{SAVE_DIR}/{OURS}/trash/"):
            self.say("P11", f"{path} is renamed to {target}")
        if inode.saved is not None and not path.startswith(f"{SAVE_DIR}/{OURS}/"):
            self.say("P5", f"{path} is renamed to {target}")

    def _has_line(self, inode: Inode, path: str) -> None:
        """A checkpoint or a hold leaves its place: for each of its tag that did there is a line (P1)."""
        place, _, name = path.rpartition("/")
        what, tag = _AUDITED.get(place, ""), name
        if place == f"{SAVE_DIR}/{OURS}/hold":
            tag = name.partition(".unknown")[0].rpartition(".")[0]
        if not what or not inode.entries or name.startswith(".") or name.endswith((".partial", ".json")):
            return  # nothing, or never whole
        lines = sum(line["action"].startswith(what) and line["tag"] == tag for line in self._lines())
        self._told[what, tag] += 1
        if lines < self._told[what, tag]:
            self.say("P1", f"{path} is removed without a line in audit.jsonl")

    def _lines(self) -> list[Any]:
        # what a full disk or a power cut left of one is no line: cut, or a block of it zeroed
        rows = (row for row in self._audit().splitlines() if row.endswith(b"}") and b"\0" not in row)
        return [self._json(row, "audit.jsonl") for row in rows]

    def on_write(self, _: Inode, path: str) -> None:
        """ckptd writes or makes something (P11)."""
        if _is_trainers(path):
            self.say("P11", f"{path} is written")

    def on_upload(self, name: str, key: str) -> None:
        """An object is about to be sent: nothing that is committed is sent again (P8)."""
        if name not in self.spoiled and any(key in live.objects for live in self.live(name)):
            self.say("P8", f"{key} is committed on {name} and sent again")

    # --- between two steps -----------------------------------------------------------------------------

    def look(self, claims: Mapping[str, list[tuple[str, str]]]) -> None:
        """Every remote as it is; `claims`: (key, digest) of what ckptd believes to be committed there."""
        self._note_finished()
        for name in self._remotes:
            found = self.live(name)
            self._same_as_ever(name, found)
            self._leaves_others_alone(name)
            self._rightly_let_go(name, found)
            if name in self.spoiled:
                continue
            there = {(live.key, live.sha256) for live in found}
            held = self._remotes[name]()
            for key, digest in claims.get(name, []):
                is_retired = key.replace("/commits/", "/retired/") in held
                if (key, digest) not in there and not is_retired:
                    self.say("P17", f"{key} counts as committed on {name} and is not")
            latest = held.get("latest")
            named = {live.folder for live in found} | self._pointed_at_others(name, held)
            if latest is not None and latest[1].decode() not in named:
                self.say("P6", f"latest of {name} names {latest[1].decode()}, which is not committed")
        self._pinned_before = frozenset(self.pinned)
        self._looked_seconds = self.clock()

    def _rightly_let_go(self, name: str, found: list[Live]) -> None:
        """What a remote held at the last look and holds no more was pinned by nobody, and no key kept it."""
        before, self._before[name] = self._before[name], {live.key: live for live in found}
        if name in self.spoiled:
            return
        held = self._remotes[name]()
        rules = self._rules_lately(self.clock() - self._looked_seconds)
        lines = [row for row in self._lines() if row["action"] == "retire"]
        for live in before.values():
            stem = live.key.rsplit("/", 1)[1]
            if live.key in self._before[name] or f"{OURS}/disputes/{stem}" in held:
                continue
            if not any([live.key, live.sha256] in row["commits"] for row in lines):
                self.say("P1", f"{name}: {live.key} is gone without a line in audit.jsonl")
            if (name, live.key) in self.being_read:
                self.say("P18", f"{name}: {live.key} is gone while somebody reads it")
            if live.tag in self.pinned and live.tag in self._pinned_before:
                self.say("P5", f"{name}: {live.key} is gone and is pinned")
            alike = [o for o in (*before.values(), *found) if o.run_id == live.run_id]
            newer = {o.key for o in alike if o.order > live.order}
            is_best = self._is_best(self.trainer.saves[live.save - 1])
            why = [r.remotes[name].why_kept(live.order[1], len(newer), is_best=is_best) for r in rules]
            if all(why):
                self.say("P5", f"{name}: {live.key} is gone, though the job file keeps it: {why[0]}")

    def _same_as_ever(self, name: str, found: list[Live]) -> None:
        known = self.first_ever[name]
        for live in found:
            if known.setdefault(live.key, live.sha256) != live.sha256:
                self.say("P3", f"{name}: {live.key} was replaced")
        runs = {live.run_id for live in found} | {run for remote, run in self.highest if remote == name}
        for run_id in sorted(runs):
            highest = max((live.order for live in found if live.run_id == run_id), default=None)
            before = self.highest.get((name, run_id))
            if before is not None and (highest is None or highest < before):
                self.say("P5", f"{name} held {before} of run {run_id} and its newest is {highest} now")
            if highest is not None:
                self.highest[name, run_id] = highest

    def _leaves_others_alone(self, name: str) -> None:
        """What another run committed is there as it was, and no limit of this one concerns it (P5)."""
        held = self._remotes[name]()
        for key, data in self._others.get(name, {}).items():
            if key not in held or held[key][1] != data:
                self.say("P5", f"{name}: {key}, which another run committed, is gone or another")
            stem = key.rsplit("/", 1)[1]
            if key.startswith(f"{OURS}/commits/") and f"{OURS}/retired/{stem}" in held:
                self.say("P5", f"{name}: {key}, which another run committed, is retired")

    def _pointed_at_others(self, name: str, held: Mapping[str, tuple[object, bytes]]) -> set[str]:
        """Folders of another run that pointers may name: it had its turn there at some time (P6)."""
        rows = [self._json(held[key][1], key) for key in held if key.startswith(f"{OURS}/runs/")]
        commits = [
            self._json(data, key)
            for key, data in self._others.get(name, {}).items()
            if key.startswith(f"{OURS}/commits/")
        ]
        had_turn = {row["run_id"] for row in rows}
        return {commit["folder"] for commit in commits if commit["run_id"] in had_turn}

    def lost_power(self, claims: Mapping[str, list[tuple[str, str]]]) -> None:
        """What was committed is there still; what nobody had called committed yet may be gone."""
        for name, known in self.first_ever.items():
            there = {live.key for live in self.live(name)}
            self.first_ever[name] = {key: digest for key, digest in known.items() if key in there}
        self.highest.clear()
        self._before = {name: {} for name in self._remotes}
        self._has_losses = False
        self.look(claims)

    # --- what people decide ----------------------------------------------------------------------------

    def on_start(self, *, seals_anew: bool) -> None:
        """The daemon starts; `seals_anew`: what lies here is completed for it once more."""
        self.belt.gone_at.clear()
        if seals_anew:
            alive = [s for s in self.trainer.saves if s.is_finished and not s.is_gone]
            self.belt.completed_at += [self.clock()] * len(alive)

    def on_pin(self, tag: str) -> None:
        """`ckptd pin` returned 0."""
        going = self._aside | self.removed.keys()
        spared = {s.number for s in self.trainer.saves if s.tag == tag and s.number in going}
        self.pinned[tag] = spared

    def on_read(self, name: str, tag: str) -> None:
        """A reader left its lease; of a list that may hide it nothing is expected."""
        if not self.was_stale:
            self.being_read |= {(name, live.key) for live in self.live(name) if live.tag == tag}

    def on_rules(self, rules: Rules, required: frozenset[str]) -> None:
        """A person changed the job file."""
        self._required = required
        self._rules_until.append((self.clock(), self.rules))
        self.rules = rules

    def lost_journal(self) -> None:
        """What no remote holds is known by its step alone from here on."""
        known = set().union(*self.ever.values())
        self.is_order_open |= self.was_stale and bool(known)
        self.unordered |= {save.number for save in self.trainer.saves} - known

    def forgot(self, name: str, key: str) -> None:
        """Somebody else removed that COMMIT."""
        self.spoiled.add(name)
        self.first_ever[name].pop(key, None)
        self.highest = {where: order for where, order in self.highest.items() if where[0] != name}


def _is_trainers(path: str) -> bool:
    """A path in save_dir where only the trainer may write, rename or remove."""
    if not path.startswith(f"{SAVE_DIR}/"):
        return False
    first, _, rest = path.removeprefix(f"{SAVE_DIR}/").partition("/")
    if first.startswith(OURS):
        return False
    return bool(rest) or not (first == "latest_universal" or first.startswith(".ckptd-tmp-"))
