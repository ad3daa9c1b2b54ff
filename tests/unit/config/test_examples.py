"""The examples that `ckptd init` prints: each file of config/ and systemd/, and nothing else."""

from __future__ import annotations

import pytest

from ckptd.config.templates import EXAMPLES, example_text
from ckptd.errors import NotFoundError
from tests.support.real import REPOSITORY

IN_TREE = {"examples": REPOSITORY / "config", "systemd": REPOSITORY / "systemd"}


def test_each_file_of_the_tree_has_a_name() -> None:
    listed = [(one.folder, one.file) for one in EXAMPLES.values()]
    there = [
        (folder, str(path.relative_to(place)))
        for folder, place in IN_TREE.items()
        for path in place.rglob("*")
        if path.is_file()
    ]
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_the_file_of_the_tree(name: str) -> None:
    one = EXAMPLES[name]
    assert example_text(name) == (IN_TREE[one.folder] / one.file).read_text()
    assert len(f"{name.ljust(max(map(len, EXAMPLES)))}  {one.what}") <= 80


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(NotFoundError) as refused:
        example_text("grafanna")
    assert refused.value.hint == "did you mean grafana? `ckptd init --list` lists them"
