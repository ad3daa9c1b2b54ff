"""The universal form of a save that no node has whole: a daemon makes it of what the remote holds (adr/0118).

Two real daemons over disks of their own, real DeepSpeed saves of two nodes; against `ds_to_universal` of the
gathered folder, and byte for byte against `ckptd convert` of it.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from tests.cluster import runs
from tests.cluster.harness import Cluster, cluster
from tests.stores import servers
from tests.support import stock

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.harness import ClusterNode
    from tests.stores.servers import Server

pytestmark = [pytest.mark.real, pytest.mark.faults]
SECONDS = 200
JOB = 'shared_takeover = "15s"'
SLOW = 'bandwidth = "120KB/s"'
FORMS = 'forms = ["zero", "universal"]'


@pytest.fixture(scope="module", autouse=True)
def _real_saves() -> None:
    runs.prepare()


def gathered(run: runs.Run, step: int, to: Path) -> Path:
    """The save in one folder, as no node has it."""
    for number in range(run.nodes):
        shutil.copytree(run.save_dir(number) / f"global_step{step}", to, dirs_exist_ok=True)
    return to


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def forms(here: Cluster) -> dict[str, str]:
    """`<tag>~g<n>` → the folder that the COMMIT of its universal form names."""
    found = here.documents("commits")
    end = "~universal.json"
    return {name.removesuffix(end): doc["folder"] for name, doc in found.items() if name.endswith(end)}


def makers(here: Cluster, tag: str) -> list[str]:
    """Who made the universal form of a tag, by attempt."""
    found = here.documents(f"shared/making/{tag}~g1~universal")
    return [found[name]["node"] for name in sorted(found)]


def half_uploads(here: Cluster) -> list[str]:
    """What is left of uploads to the folder of the maker that was killed."""
    if here.server is None:
        first = here.nas / "global_step2_universal"
        return [str(first)] if first.exists() else []
    client = here.server.client()
    found = client.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", ())
    return [upload["Key"] for upload in found if "_universal/" in upload["Key"]]


def is_told(node: ClusterNode, tag: str) -> bool:
    """Its status knows that the form is committed."""
    return bool(node.checkpoint(tag)["remotes"]["nas"]["universal"]["state"] == "committed")


@pytest.mark.parametrize("on_s3", [False, pytest.param(True, marks=pytest.mark.full)], ids=["nas", "s3"])
def test_the_form_is_made_once_and_by_another_when_its_maker_is_killed(
    tmp_path: Path, moto: Server, on_s3: bool
) -> None:
    run = runs.LOCAL_2
    with cluster(tmp_path, moto if on_s3 else None) as here:
        for number, name in enumerate(("a", "b")):
            node = here.add(name, job=JOB, local="save_total_limit = 2", remote=f"{FORMS}\n{SLOW}")
            node.start()
            node.write(run, number, 2)
        here.wait_committed("global_step2~g1", SECONDS)
        first = "global_step2_universal/"
        here.wait("a form under way", lambda: len(here.objects(first)) > 2, SECONDS)
        (maker,) = makers(here, "global_step2")
        heir = next(name for name in here.nodes if name != maker)
        told = here.nodes[heir].checkpoint
        here.wait(
            "the other one to say whom it waits for",
            lambda: told("global_step2")["remotes"]["nas"]["universal"]["reason"] == f"{maker} makes it",
            SECONDS,
        )
        here.nodes[maker].kill()
        assert forms(here) == {}, "it was too fast to be killed"
        here.wait("the form", lambda: forms(here), SECONDS)
        assert makers(here, "global_step2") == [maker, heir]
        assert forms(here) == {"global_step2~g1": "global_step2_universal.a2"}
        here.wait("what was sent to be swept", lambda: not here.objects(first), SECONDS)

        here.nodes[maker].write_job(remote=FORMS)
        here.nodes[maker].start()
        here.nodes[heir].stop(30)
        here.nodes[heir].write_job(remote=FORMS)
        here.nodes[heir].start()
        for number, name in enumerate(("a", "b")):
            here.nodes[name].write(run, number, 4)
        here.wait("the next one", lambda: "global_step4~g1" in forms(here), SECONDS)
        for node in here.nodes.values():
            for tag in ("global_step2", "global_step4"):
                here.wait(f"{node.name} to hear of {tag}", lambda n=node, t=tag: is_told(n, t), SECONDS)  # type: ignore[misc]
            assert not node.problems(), node.status()["problems"]
            assert not list((node.save_dir / "_ckptd" / "staging").iterdir())
            assert not (node.save_dir / "_ckptd" / "derived" / "universal").exists()
        here.wait("half uploads to be given up", lambda: not half_uploads(here), SECONDS)
        assert forms(here)["global_step4~g1"] == "global_step4_universal"
        assert here.read("latest_universal") == "global_step4_universal"
        assert len(makers(here, "global_step4")) == 1
        folders = {key.partition("/")[0] for key in here.objects("global_step") if "_universal" in key}
        assert folders == set(forms(here).values())
        made_of(run, here, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("on_s3", [False, True], ids=["nas", "s3"])
def test_of_a_damaged_shard_no_form_is_made_before_it_was_sent_again(
    tmp_path: Path, moto: Server, on_s3: bool
) -> None:
    """Both daemons name it, with a command; that mends it, and the form comes without any start."""
    run, tag = runs.LOCAL_2, "global_step2"
    with cluster(tmp_path, moto if on_s3 else None) as here:
        for number, name in enumerate(("a", "b")):
            here.add(name, job=JOB, remote='forms = ["zero"]').start()
            here.nodes[name].write(run, number, 2)
        here.wait_committed(f"{tag}~g1", SECONDS)
        here.wait_told(f"{tag}~g1")
        for node in here.nodes.values():
            node.stop()
        key = next(k for k in here.objects(f"{tag}/") if "pp_rank_0_" in k and "optim" in k)
        data = bytearray(here.read_bytes(key))
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
            largest = max(archive.infolist(), key=lambda one: one.file_size)
        data[largest.header_offset + largest.file_size // 2] ^= 1
        here.write_bytes(key, bytes(data))

        for node in here.nodes.values():
            node.write_job(remote='forms = ["zero", "universal", "weights-fp32"]')
            node.start()
        for node in here.nodes.values():
            here.wait(f"{node.name} to say so", lambda n=node: "source-damaged" in n.problems(), SECONDS)  # type: ignore[misc]
            (said,) = (p for p in node.status()["problems"] if p["code"] == "source-damaged")
            assert key in said["text"]
            assert "verify" in said["next_step"]
        assert forms(here) == {}
        words = [sys.executable, "-m", "ckptd", "verify", str(here.nodes["a"].job_file), tag]
        mended = subprocess.run(
            [*words, "--repair", "--read-data"],
            env=os.environ | here.nodes["a"].environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert mended.returncode == 0, mended.stdout + mended.stderr
        here.wait("the form", lambda: forms(here), SECONDS)
        weights = f"{tag}~g1~weights-fp32.json"
        here.wait("the weights", lambda: weights in here.documents("commits"), SECONDS)
        for node in here.nodes.values():
            here.wait("it to clear", lambda n=node: "source-damaged" not in n.problems(), SECONDS)  # type: ignore[misc]
        convert(gathered(run, 2, tmp_path / "whole"), tmp_path / "ours", ConvertOptions())
        assert here.contents(forms(here)[f"{tag}~g1"]) == contents(tmp_path / "ours")
        folders = {k.partition("/")[0] for k in here.objects(tag) if "_universal" in k}
        assert folders == set(forms(here).values()), "what was made of damaged bytes is gone"


def made_of(run: runs.Run, here: Cluster, tmp_path: Path) -> None:
    """Each form is what one process makes of the gathered save, and every tensor DeepSpeed's converter's.

    The superset of layouts that ckptd writes has files, and keys of one file, that the stock one has not.
    """
    pairs, ours = [], []
    for key, folder in forms(here).items():
        step = int(key.partition("~")[0].removeprefix("global_step"))
        whole = gathered(run, step, tmp_path / f"whole{step}")
        convert(whole, tmp_path / f"ours{step}", ConvertOptions())
        theirs = here.contents(folder)
        assert theirs == contents(tmp_path / f"ours{step}")
        fetched = tmp_path / "fetched" / folder
        for name, data in theirs.items():
            (fetched / name).parent.mkdir(parents=True, exist_ok=True)
            (fetched / name).write_bytes(data)
        pairs.append((whole, tmp_path / f"stock{step}"))
        ours.append((tmp_path / f"stock{step}", fetched))
    stock.convert(pairs)
    superset = ("only ", "zero/optimizer_state.pt: keys ")
    found = stock.differences(ours)
    assert len(found) == 2
    assert [[one for one in each if not one.startswith(superset)] for each in found] == [[], []]
    for one, made in ours:
        both = contents(one).keys() & contents(made).keys()
        assert sum(name.endswith("exp_avg.pt") for name in both) > 10
