"""Virtual time for programs that block: one runs at a time, in an order that a seed alone decides.

A program is an ordinary function in a thread of its own; where it would wait for an answer it hands the baton
to whoever is next in virtual time. So real code runs unchanged, and may be ended at any of its requests.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_STACK_BYTES = 512 << 10


class Killed(BaseException):
    """The process of this program is no more; nothing of it may catch this."""


class Program:
    """A function that runs in virtual time."""

    def __init__(self, engine: Engine, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.is_over = False
        self.engine = engine
        self._function = function
        self._go = threading.Lock()
        self._go.acquire()
        self._is_killed = False
        self._is_dozing = False
        self._wakes = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.wake_in(0.0)

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_killed:
                self._function()
        except Killed:
            pass
        except BaseException as error:  # the story's, told by the engine
            self.engine.failure = error
        self.is_over = True
        self.engine.back.release()

    def wake_in(self, seconds: float) -> None:
        """Go on then; a wake that was set before counts no more."""
        self._wake_at(self.engine.now + seconds)

    def _wake_at(self, when: float) -> None:
        self._wakes += 1
        self.engine.at(when, self, self._wakes)

    def is_due(self, wake: int) -> bool:
        """Whether that wake still counts."""
        return not self.is_over and wake == self._wakes

    def go(self) -> None:
        """Hand it the baton."""
        self._go.release()

    def wait(self, seconds: float) -> None:
        """Called within the program: go on after that time.

        Raises:
            Killed: it was ended meanwhile.
        """
        self.wait_until(self.engine.now + seconds)

    def wait_until(self, when: float) -> None:
        """As `wait`: go on at that time."""
        if not self.engine.pass_by(when):
            self._wake_at(when)
            # from one program to the next, past the engine, which runs what is no program
            self.engine.hand_on()
            self._go.acquire()
        self._end_if_killed()

    def doze(self, until: float) -> None:
        """As `wait_until`, or until somebody stirs it."""
        self._is_dozing = True
        try:
            self.wait_until(until)
        finally:
            self._is_dozing = False

    def stir(self) -> None:
        """End its doze, if it is in one."""
        if self._is_dozing:
            self.wake_in(0.0)

    def _end_if_killed(self) -> None:
        if self._is_killed:
            raise Killed

    def kill(self) -> None:
        """End it where it waits, at once."""
        if self.is_over:
            return
        self._is_killed = True
        self._wakes += 1
        self._go.release()
        self.engine.take_back()
        self._thread.join()

    def abandon(self) -> None:
        """The story is over: end it, whatever it says."""
        if not self.is_over:
            self._is_killed = True
            self._go.release()
            self.engine.back.acquire()
        self._thread.join()


class Engine:
    """The clock, and who is next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.back = threading.Lock()
        self.back.acquire()
        self._due: list[tuple[float, int, Program | Callable[[], None], int]] = []
        self._numbers = itertools.count()
        self._until = 0.0
        self.failure: BaseException | None = None
        """What a program ended with."""
        threading.stack_size(_STACK_BYTES)

    def at(self, when: float, what: Program | Callable[[], None], wake: int = 0) -> None:
        """Resume a program, or call a function, at that time."""
        heapq.heappush(self._due, (when, next(self._numbers), what, wake))

    def pass_by(self, then: float) -> bool:
        """Nobody else is due before: the clock goes on at once, and no baton changes hands."""
        if then > self._until or (self._due and self._due[0][0] <= then):
            return False
        self.now = then
        return True

    def hand_on(self) -> None:
        """The baton goes to whoever is due next."""
        while self._due:
            when, _, what, wake = self._due[0]
            if when > self._until or not isinstance(what, Program):
                break
            heapq.heappop(self._due)
            if what.is_due(wake):
                self.now = when
                what.go()
                return
        self.back.release()

    def take_back(self) -> None:
        """Wait for the baton.

        Raises:
            BaseException: what a program ended with.
        """
        self.back.acquire()
        if self.failure is not None:
            raise self.failure

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        self._until = until
        while self._due and self._due[0][0] <= until:
            when, _, what, _ = self._due[0]
            if isinstance(what, Program):
                self.hand_on()
                self.take_back()
            else:
                heapq.heappop(self._due)
                self.now = when
                what()
        self.now = max(self.now, until)
