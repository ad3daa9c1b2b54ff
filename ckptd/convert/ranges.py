"""Where the bytes of a plan come from: local files by descriptor, or any place that gives ranges of them.

Local files keep their fast paths (clones, copies in the kernel, O_DIRECT): whoever has those asks for
`local`. Everything else reads blocks through `read`, wherever they lie (docs/adr/0092).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.convert.sources import Sources


class Ranges(ABC):
    """The source files of a plan by number; safe for several threads."""

    @property
    def local(self) -> Sources | None:
        """The same as descriptors; None where there are none."""
        return None

    @abstractmethod
    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes at `offset` of source number `source`; fewer at its end.

        Raises:
            SourceChanged: it is no longer the planned one. RemoteError: it does not answer.
        """
