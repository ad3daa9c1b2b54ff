"""What a page of the Guide says in sentences: without code, tables, headings."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^```text$.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"`[^`]*`", re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def prose(page: str) -> str:
    """The sentences of a page; a piece of code in them is the word `code`, a link its text."""
    text = _SPAN.sub("code", _COMMENT.sub("", _FENCE.sub("", page)))
    kept = (line for line in text.splitlines() if not line.startswith(("#", "|", "![")))
    return _LINK.sub(r"\1", "\n".join(kept)).replace("*", "")


def sentences(page: str) -> list[str]:
    """The sentences of a page; items of a list and paragraphs end one."""
    blocks = re.split(r"\n\s*\n|\n\s*(?:-|\d+\.) ", prose(page))
    found = (re.split(r"(?<=[.!?])\s+", " ".join(block.split())) for block in blocks)
    return [sentence for block in found for sentence in block if re.search(r"\w", sentence)]


def commands(page: str) -> list[list[str]]:
    """The words of each `ckptd …` in a page's code; a block marked `text` is what was printed."""
    page = _PRINTED.sub("", page)
    code = [match[0].strip("`") for match in _SPAN.finditer(_FENCE.sub("", page))]
    code += [line for match in _FENCE.finditer(page) for line in match[0].replace("\\\n", " ").splitlines()]
    found = (
        re.search(r"(?:^|[\s(/])ckptd ([a-z][a-z-]*\b[^|>;&#)]*)", " ".join(one.split())) for one in code
    )
    return [match[1].split() for match in found if match]
