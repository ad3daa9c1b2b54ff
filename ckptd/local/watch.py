"""inotify as a hint: something moved in save_dir or in a folder that is being saved, so look sooner (§3).

Watches are not recursive. An event that is lost (queue overflow, network file system, watch limit) costs at
most one rescan interval; nothing is ever decided from an event. Trainers may send hints themselves (`hints`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from ckptd.core.listing import OURS
from ckptd.local.hints import Hints
from ckptd.local.state_dir import filesystem_type, is_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from watchdog.observers.api import ObservedWatch

_MEANT: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]
"""Reading a file or a folder, as our own scans do, is no hint."""
_FOLDER_CAME = (DirCreatedEvent, DirMovedEvent)
_WRITES = (FileCreatedEvent, FileModifiedEvent, FileMovedEvent, FileClosedEvent)
"""In a folder of save_dir: what lies beside them (a log of each step) is no save."""


class OnHint(Protocol):
    """`is_writing`: a save may be under way."""

    def __call__(self, *, is_writing: bool = False) -> None:
        """Called in the watcher's threads."""


class Watcher:
    """Watches save_dir and its unfinished tag folders; calls `on_hint` from its own thread.

    It says whether something is written in a folder, or a folder came: a save may begin.
    """

    def __init__(self, save_dir: str, on_hint: OnHint) -> None:
        self._save_dir = save_dir
        self._gone: set[str] = set()
        """Paths of folders that went; what has such a name now is another one, which no watch is on."""
        self._handler = _Handler(save_dir, on_hint, self._gone.add)
        self._hints = Hints(save_dir, on_hint)
        self._observer = Observer()
        self._observer.daemon = True
        self._watches: dict[str, ObservedWatch] = {}
        self.problem: str | None = None
        """Why hints do not arrive (rescans still do the work)."""
        self._is_shared = is_network(filesystem_type(Path(save_dir)))

    def start(self) -> None:
        """Begin with save_dir itself."""
        self._hints.start()
        try:
            self._observer.start()
            self._schedule(self._save_dir)
        except OSError as error:
            self.problem = f"no file events ({error.strerror}); rescans find everything"

    @property
    def hears_all(self) -> bool:
        """No new folder appears without a hint: on a shared file system other nodes' would."""
        return self.problem is None and not self._is_shared

    def follow(self, folders: Iterable[str]) -> None:
        """Watch exactly these folders below save_dir beside save_dir itself."""
        wanted = set(folders)
        heard = self._gone.copy()
        self._gone.difference_update(heard)
        gone = {name for name in self._watches if f"{self._save_dir}/{name}" in heard}
        for name in (set(self._watches) - wanted) | gone:
            with contextlib.suppress(KeyError, OSError):
                self._observer.unschedule(self._watches.pop(name))
        for name in wanted - set(self._watches):
            try:
                watch = self._schedule(f"{self._save_dir}/{name}")
            except FileNotFoundError:
                continue
            except OSError as error:
                self.problem = f"no file events for {name} ({error.strerror}); rescans find everything"
            else:
                self._watches[name] = watch

    def _schedule(self, path: str) -> ObservedWatch:
        return self._observer.schedule(self._handler, path, recursive=False, event_filter=_MEANT)

    def stop(self) -> None:
        """End the threads."""
        self._hints.stop()
        with contextlib.suppress(RuntimeError):
            self._observer.stop()
            self._observer.join(timeout=2)


class _Handler(FileSystemEventHandler):
    def __init__(self, save_dir: str, on_hint: OnHint, on_gone: Callable[[str], None]) -> None:
        self._save_dir = save_dir
        self._ours = f"{save_dir}/{OURS}"
        self._on_gone = on_gone
        self._on_hint = on_hint

    def on_any_event(self, event: FileSystemEvent) -> None:
        path = os.fsdecode(event.src_path)
        if path.startswith(self._ours):
            return
        if isinstance(event, DirDeletedEvent | DirMovedEvent):
            self._on_gone(path)
        is_below = os.path.dirname(path) != self._save_dir
        self._on_hint(is_writing=isinstance(event, _FOLDER_CAME) or (is_below and isinstance(event, _WRITES)))
