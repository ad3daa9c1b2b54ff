"""Tell which universal forms the loader of each DeepSpeed version reads (docs/formats.md §5.1)."""

from __future__ import annotations

STAGE3_FORMS_SINCE = (0, 14, 5)
"""First version that loads a universal form in ZeRO stage 3; of one sub-group alone."""
STAGE3_SUB_GROUPS_SINCE = (0, 18, 3)
"""First version known to load one of several parameter groups or sub-groups."""


def version_tuple(text: str) -> tuple[int, ...]:
    """ "0.19.8+abc" → (0, 19, 8); empty when unreadable."""
    numbers: list[int] = []
    for word in text.split("+")[0].split(".")[:3]:
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def stage3_loader_word(ds_version: str | None, groups: int | None) -> str | None:
    """Say why the version that saved cannot load a stage 3 universal form in stage 3; None: it can.

    `groups`: sub-groups of the save, None when they are not known.
    """
    version = version_tuple(ds_version or "")
    if version >= STAGE3_SUB_GROUPS_SINCE or (version >= STAGE3_FORMS_SINCE and groups == 1):
        return None
    saver = (
        f"DeepSpeed {ds_version}, which saved this" if version else "the DeepSpeed that saved this (unknown)"
    )
    what = "a universal form in stage 3"
    if version >= STAGE3_FORMS_SINCE:
        several = "several parameter groups or sub-groups" if groups is None else f"{groups} sub-groups"
        what = f"a stage 3 universal form of {several}"
    return f"{saver}, cannot load {what}: load it with 0.18.3 or newer"
