"""Explicit-state search over real code: every interleaving of programs, state by state (breadth first).

A program is an ordinary function that touches the world through `Io.ask` alone. Where it stands is told by
the answers it got so far, so a state keeps a number for them; the function runs again from its beginning only
when a new answer is met. States are tuples of small numbers; what is equal is visited once.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

S = TypeVar("S")


class _Asked(BaseException):
    """The program asked for something whose answer is not known yet; no handler of it may catch this."""

    def __init__(self, op: tuple[Hashable, ...]) -> None:
        super().__init__()
        self.op = op


class Io:
    """What a program asks: the answers that it got so far, then the next question."""

    def __init__(self, answers: list[Hashable]) -> None:
        self._answers = answers
        self._next = 0

    def ask(self, *op: Hashable) -> Hashable:
        """The world's answer to `op`."""
        if self._next == len(self._answers):
            raise _Asked(op)
        self._next += 1
        return self._answers[self._next - 1]


@dataclass(slots=True)
class _Point:
    """Where a program stands: `op` waits for an answer, or it ended with `result`."""

    parent: int
    answer: Hashable
    key: Hashable
    op: tuple[Hashable, ...] | None = None
    result: tuple[Hashable, ...] = ()
    after: dict[Hashable, int] = field(default_factory=dict)


class Programs:
    """All programs that run, by number: what they ask next, or how they ended."""

    def __init__(self, function: Callable[[Io, Hashable], tuple[Hashable, ...]]) -> None:
        self._function = function
        self._points: list[_Point] = []
        self._begun: dict[Hashable, int] = {}

    def begin(self, key: Hashable) -> int:
        """Start the program that `key` names."""
        found = self._begun.get(key)
        if found is None:
            found = self._begun[key] = self._add(-1, None, key)
        return found

    def go_on(self, at: int, answer: Hashable) -> int:
        """Give the program its answer."""
        point = self._points[at]
        found = point.after.get(answer)
        if found is None:
            found = point.after[answer] = self._add(at, answer, point.key)
        return found

    def op(self, at: int) -> tuple[Hashable, ...] | None:
        """What it asks; None: it has ended."""
        return self._points[at].op

    def result(self, at: int) -> tuple[Hashable, ...]:
        """How it ended."""
        return self._points[at].result

    def __len__(self) -> int:
        return len(self._points)

    def _add(self, parent: int, answer: Hashable, key: Hashable) -> int:
        point = _Point(parent, answer, key)
        answers: list[Hashable] = [] if parent < 0 else [answer]
        while parent >= 0 and self._points[parent].parent >= 0:
            answers.append(self._points[parent].answer)
            parent = self._points[parent].parent
        try:
            point.result = self._function(Io(answers[::-1]), key)
        except _Asked as asked:
            point.op = asked.op
        self._points.append(point)
        return len(self._points) - 1


class Violation(AssertionError):
    """A state that must not be, and the shortest way to it."""


@dataclass(slots=True, kw_only=True)
class Explored(Generic[S]):
    """What a search saw."""

    states: int
    transitions: int
    is_complete: bool
    """False: the bound on states was met first."""


class Search(Generic[S]):
    """Breadth first over `successors`, which yields (label, state, is_fair) for each step of the world.

    `wrong(state)` says why a state must not be; `is_good(state)` must stay reachable by fair steps alone from
    each state (strong fairness: whoever may go on does, nobody fails any more); None: no such demand.
    """

    def __init__(
        self,
        successors: Callable[[S], Iterable[tuple[str, S, bool]]],
        wrong: Callable[[S], str | None],
        is_good: Callable[[S], bool] | None = None,
    ) -> None:
        self._successors = successors
        self._wrong = wrong
        self._is_good = is_good
        self._numbers: dict[S, int] = {}
        self._parents = array("q")
        self._labels: list[str] = []

    def run(self, start: S, most_states: int = 10_000_000) -> Explored[S]:
        """Explore all.

        Raises:
            Violation: with the steps that lead there.
        """
        fair: list[tuple[int, int]] = []
        transitions = 0
        queue = deque([start])
        self._note(start, -1, "")
        while queue and len(self._numbers) < most_states:
            state = queue.popleft()
            number = self._numbers[state]
            for label, after, is_fair in self._successors(state):
                transitions += 1
                if after not in self._numbers:
                    self._note(after, number, label)
                    queue.append(after)
                if is_fair and self._is_good is not None:
                    fair.append((number, self._numbers[after]))
        explored = Explored[S](states=len(self._numbers), transitions=transitions, is_complete=not queue)
        if self._is_good is not None and explored.is_complete:
            self._reach_good(self._is_good, fair)
        return explored

    def _note(self, state: S, parent: int, label: str) -> None:
        self._numbers[state] = len(self._numbers)
        self._parents.append(parent)
        self._labels.append(label)
        reason = self._wrong(state)
        if reason is not None:
            raise Violation(f"{reason}\n{self.path(len(self._numbers) - 1)}")

    def _reach_good(self, is_good: Callable[[S], bool], fair: list[tuple[int, int]]) -> None:
        before: dict[int, list[int]] = {}
        for source, target in fair:
            before.setdefault(target, []).append(source)
        good = [number for state, number in self._numbers.items() if is_good(state)]
        reached = set(good)
        while good:
            for source in before.get(good.pop(), ()):
                if source not in reached:
                    reached.add(source)
                    good.append(source)
        lost = next((n for n in range(len(self._numbers)) if n not in reached), None)
        if lost is not None:
            raise Violation(f"never good again, though everybody goes on\n{self.path(lost)}")

    def path(self, number: int) -> str:
        """The steps from the start to a state."""
        labels: list[str] = []
        while self._parents[number] >= 0:
            labels.append(self._labels[number])
            number = self._parents[number]
        return "\n".join(reversed(labels))
