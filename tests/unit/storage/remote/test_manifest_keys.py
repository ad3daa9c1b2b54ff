"""Which node manifests belong to which generation, of one listing of thousands of names."""

from __future__ import annotations

from ckptd.storage.remote.documents import NODES, manifest_keys
from tests.stores.memory import MemoryStore


def test_each_manifest_is_told_by_its_folder_whatever_strangers_leave_beside() -> None:
    """A file straight under `nodes/` hid all folders that came after it."""
    folders = {("global_step1", 1, "zero"), ("global_step1", 1, "universal"), ("global_step10", 2, "zero")}
    keys = {
        where: [f"{NODES}{where[0]}~g{where[1]}~{where[2]}/n{n}.json" for n in range(3)] for where in folders
    }
    store = MemoryStore()
    strangers = [".DS_Store", "0", "global_step1", "global_step1~g1~zero.json", "odd/n0.json", "zzz"]
    for key in [
        *(key for found in keys.values() for key in found),
        *(f"{NODES}{s}" for s in strangers),
    ]:
        store.put(key, b"{}")
    assert manifest_keys(store.list(NODES)) == keys
