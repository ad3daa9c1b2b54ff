"""Defects put into ckptd by hand, each by one patch: the simulation that misses one is broken itself.

The first seven were never in ckptd; most others are defects that the simulation found in it. That sources are
looked at again before a COMMIT is not among them: their CRCs tell a mixture before (tests/seeded, 3).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

from ckptd.base import files
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.model.save import Order
from ckptd.core.policy import local, planner, remote, retention
from ckptd.core.policy.actions import Hold
from ckptd.daemon import crash_recovery
from ckptd.daemon.intake import clones as holds
from ckptd.daemon.intake import known_saves, ordering
from ckptd.daemon.state.deletions import Deletions
from ckptd.observe.audit import Audit
from ckptd.storage.child import service
from ckptd.storage.local import clones as hold
from ckptd.storage.local import fs
from ckptd.storage.remote import deletion, messages, transfer
from ckptd.storage.remote.documents import read_generation
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.stores.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _no_fsync_dir(_: int) -> None:
    return None


def _always_confirmed(*_: Any, **__: Any) -> messages.Confirmed:
    return messages.Confirmed(ok=True)


def _not_flushed(_fd: int, _tag: str, _paths: Any) -> None:
    return None


def _unverified(self: Any, sent: Any) -> None:
    from ckptd.storage.stores.checksums import to_hex

    self._keep(sent.file, sent.bytes, to_hex(sent.crc), "read-back", sent.fingerprint)


def _objects_first(ground: Any, order: DeleteCommit, check: Callable[[], None]) -> None:
    where = (order.tag, order.generation, order.form)
    for known in read_generation(ground.store, where):
        for file in known.manifest.files:
            check()
            ground.store.delete(file.key)
    deletion.delete_commit(ground, order, check)


def _overwritten(dir_fd: int, name: str, data: bytes, *, mode: int = 0o644) -> bool:
    files.write_atomic(dir_fd, name, data, mode=mode)
    return True


def _uploaded_is_committed(state: Any, _save_dir_fd: int) -> None:
    for save_id, records in list(state.uploads.records.items()):
        for record in list(records.values()):
            if record.state is UploadState.UPLOADING:
                key = f"_ckptd/commits/{state.saves.rows[save_id].save.tag}~g{record.generation}~{ZERO}.json"
                done = {"state": UploadState.COMMITTED, "commit_key": key, "commit_sha256": "0" * 64}
                state.uploads.put(save_id, record.model_copy(update=done))


def _finish_prune(trash_fd: int, name: str, sealed: Any) -> None:
    with mock.patch.object(files, "fsync_dir", _no_fsync_dir):
        _real_finish(trash_fd, name, sealed)


_real_finish = fs.finish_deletion


def _remove_all(trash_fd: int, name: str, _: Any) -> None:
    files.remove_tree(trash_fd, name)
    files.fsync_dir(trash_fd)


def _one_branch(step: int, highest: Order | None) -> Order:
    return Order(1, step, highest.save_seq + 1 if highest else 1)


def _holds(view: Any, *rest: Any, **more: Any) -> list[Any]:
    held = [
        Hold(save_id=s.id)
        for s in view.saves
        if s.is_intact
        and not s.is_held
        and not s.is_busy
        and not local.is_committed(view, s)
        and view.disk.can_clone
    ]
    return [*(x for x in _real_holds(view, *rest, **more) if not isinstance(x, Hold)), *held]


_real_holds = planner._holds


def _keep_remote(view: Any) -> Any:
    from dataclasses import replace

    return remote.keep_remote(replace(view, unsealed_tags=frozenset()))


def _no_best(best: Any, *_: Any) -> None:
    return None


PATCHES: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "no folder is flushed": ((files, "fsync_dir", _no_fsync_dir),),
    "a permit without a fresh read": ((service, "confirm", _always_confirmed),),
    "sealed without a flush": ((fs, "flush", _not_flushed),),
    "committed before it is verified": ((transfer.Transfer, "_verify", _unverified),),
    "objects go before their COMMIT": ((service, "delete_commit", _objects_first),),
    "create-only replaces": ((files, "create_exclusive", _overwritten),),
    "what was on its way counts as committed": ((crash_recovery, "_take_up_again", _uploaded_is_committed),),
    "identities are not compared before a prune": (
        (fs, "check_identities", lambda *_, **__: None),
        (fs, "finish_deletion", _remove_all),
    ),
    "a prune is called done before it is durable": ((fs, "finish_deletion", _finish_prune),),
    "a hold is let go as soon as it is made": ((planner, "_holds", _holds),),
    "what lies here unsealed is retired": ((planner, "keep_remote", _keep_remote),),
    "what was found is not flushed": ((DirectoryStore, "flush_name", lambda *_: None),),
    "pins are not looked at": (
        (known_saves.KnownSaves, "pins", frozenset()),
        (known_saves.KnownSaves, "is_pinned", lambda *_: False),
        (deletion, "is_pinned", lambda *_: False),
    ),
    "readers are not looked at": ((deletion, "reader_of", lambda *_: None),),
    "keep_every_steps is not looked at": ((retention, "_divided", lambda *_: []),),
    "keep_best is not looked at": (
        (local, "score_of", _no_best),
        (remote, "score_of", _no_best),
    ),
    "deletions are not limited": ((Deletions, "_left", lambda *_: 1000),),
    "what goes has no line in audit.jsonl": ((Audit, "write", lambda *_, **__: None),),
    "a hold of no use goes without a line": (
        (holds, "_release", lambda _state, fd, name, *_: hold.release(fd, name)),
    ),
    "a rewind is no new branch": ((ordering, "next_order", _one_branch),),
}


@contextlib.contextmanager
def seeded(defect: str) -> Iterator[None]:
    """ckptd with one of its guards taken out."""
    with contextlib.ExitStack() as stack:
        for where, name, value in PATCHES[defect]:
            stack.enter_context(mock.patch.object(where, name, value))
        yield
