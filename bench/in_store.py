"""`python -m bench.in_store`: how much of a form crosses the network when the remote holds its shards.

Planned: for real shapes and grids the share of each form's bytes that the plan takes from committed shards
and that S3 copies as parts (5 MiB at least); pickles, names and sizes are real, storages are holes
(`bench.sparse`), so that a 70B save fits. Measured: one layer of those shapes, uploaded to moto and to Ceph's
gateway (`make rgw-packages`) through a proxy that paces each connection and counts; and ten saves of a LoRA
run. Writes its parts of docs/performance.md, and docs/in_store.png.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import sparse
from bench.limited import limited
from bench.pictures import replace_part
from bench.report import machine
from ckptd.conversion.engine.staging import list_source
from ckptd.conversion.engine.supervisor import origin_of, plan_request, write_plan
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.outputs import Outputs
from ckptd.conversion.parts import Range
from ckptd.core.model.records import UNIVERSAL
from ckptd.storage.stores.base import HeldRange
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3.parts import held_parts
from ckptd.storage.stores.s3.store import S3Store
from tests.stores import rgw as ceph
from tests.stores import servers
from tests.stores.adapters import AdapterModel
from tests.stores.scene import MODEL, OPTIM, Node, archive
from tests.support.real import REPOSITORY
from tests.unit.storage.remote.test_making import Scene

WORK = REPOSITORY / ".build" / "bench" / "in_store"
LEAST_FILE_BYTES = 8 << 20
LLAMA_7B = sparse.llama(4096, 32, 32000, 11008, 4096)
LLAMA_8B = sparse.llama(4096, 32, 128256, 14336, 1024)
LLAMA_70B = sparse.llama(8192, 80, 128256, 28672, 1024)
CASES = [
    sparse.Model(f"{name}, stage {stage}, dp {dp}", shapes, stage, dp)
    for name, shapes in (("Llama 2 7B", LLAMA_7B), ("Llama 3 8B", LLAMA_8B), ("Llama 3 70B", LLAMA_70B))
    for stage, dp in ((1, 8), (2, 64), (3, 8), (3, 64))
]
LAYERS = [
    sparse.Model(
        f"one layer of Llama 2 7B, stage {stage}, dp 8", sparse.llama(4096, 1, 256, 11008, 4096), stage, 8
    )
    for stage in (2, 3)
]
FORMS = {
    "universal": ConvertOptions(),
    "weights-fp32": ConvertOptions(form="weights"),
    "weights-bf16": ConvertOptions(form="weights", dtype="bf16"),
}


@dataclass(frozen=True, slots=True)
class Share:
    """A form: its bytes, those that no part of the store holds, and its requests."""

    form: str
    model: sparse.Model
    files: int
    bytes: int
    sent_bytes: int


def shares(model: sparse.Model) -> Iterator[Share]:
    """Plan each form of a model and count."""
    WORK.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=WORK))
    try:
        sparse.write(place / "save", model)
        for form, options in FORMS.items():
            yield share_of(place / "save", model, form, options)
    finally:
        shutil.rmtree(place)


def share_of(place: Path, model: sparse.Model, form: str, options: ConvertOptions) -> Share:
    """Plan one form as an upload does, and take away what the store can copy."""
    folder = list_source(place)
    with tempfile.TemporaryFile(dir=WORK) as plan:
        write_plan(plan_request(folder, origin_of(folder, options), options, block=False), plan)
        outputs = Outputs(plan)
        total = sent = 0
        for path, planned in outputs.files.items():
            total += planned.nbytes
            sent += planned.nbytes - copied_bytes(outputs, path, planned.nbytes)
        return Share(form, model, len(outputs.files), total, sent)


def copied_bytes(outputs: Outputs, path: str, nbytes: int) -> int:
    """Bytes of one file that S3 copies from the shards."""
    if nbytes <= LEAST_FILE_BYTES:
        return 0
    found, at = [], 0
    for part in outputs.output(path).parts:
        if isinstance(part, Range):
            key = str(part.source)
            found.append(HeldRange(offset=at, length=part.nbytes, key=key, key_offset=part.offset))
        at += part.nbytes
    return sum(one.length for one in held_parts(found, nbytes))


# --- measured: one layer at a proxy ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentForm:
    """One form through the proxy: its bytes, those that crossed the network each way, and the time."""

    bytes: int
    up_bytes: int
    down_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One form through the proxy: with copies in the store, and as it is sent where the store makes none."""

    server: str
    model: sparse.Model
    link_bytes_per_second: float
    """Of each connection."""
    copied: SentForm
    sent: SentForm


SERVERS = {"moto": servers.moto, "Ceph": ceph.rgw}
MOST_OF_THE_TIME = 0.1
"""That a form may take of what sending it takes."""


def sent_form(
    name: str, model: sparse.Model, link_bytes_per_second: float, *, copies: bool, is_afar: bool = False
) -> SentForm:
    """Upload the ZeRO form past the proxy, then its universal form through it, committed and proved.

    Each connection has `link_bytes_per_second`. `is_afar`: the node has no shard any more, and makes the form
    of those in the store.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=WORK))
    os.environ.update(servers.environment())
    try:
        (root := place / "server").mkdir()
        with SERVERS[name](root) as server, limited(server.port, link_bytes_per_second) as link:
            scene = Scene(place / "scene", sparse.write(place / "save", model))
            scene.node.dp, scene.node.zero_stage = model.dp, model.stage
            prefix = f"s3://{servers.BUCKET}/form"
            scene.ground = scene.node.attached(store_at(server.endpoint, prefix))
            order = scene.node.order(scene.node.sealed())
            assert scene.node.upload(scene.ground, order).outcome == "committed"
            near = store_at(link.endpoint, prefix)
            near.abilities = replace(near.abilities, copies=copies)
            scene.ground = replace(scene.ground, store=near)
            making = scene.order_from_remote(UNIVERSAL) if is_afar else scene.order(UNIVERSAL)
            link.reset()
            began = time.monotonic()
            result = scene.upload(making)
            assert result.outcome == "committed"
            total = result.bytes_sent + result.bytes_copied
            return SentForm(total, link.up_bytes, link.down_bytes, time.monotonic() - began)
    finally:
        shutil.rmtree(place)


def measured(name: str, model: sparse.Model, link_bytes_per_second: float) -> Measured:
    """Send a form with copies and without, each to a server of its own."""
    copied, sent = (sent_form(name, model, link_bytes_per_second, copies=copies) for copies in (True, False))
    return Measured(name, model, link_bytes_per_second, copied, sent)


# --- measured: ten saves of a LoRA run -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdapterSaves:
    """The saves of one run: bytes of each, of what changed in it, and what of each crossed the network."""

    save_bytes: int
    changed_bytes: int
    up_bytes: tuple[int, ...]


def adapter_saves(link_bytes_per_second: float, saves: int = 10, lora_rank: int = 16) -> AdapterSaves:
    """Upload saves of one bf16 layer of Llama 2 7B, with LoRA of its projections, through the proxy."""
    WORK.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=WORK))
    os.environ.update(servers.environment())
    hidden, inner = 4096, 11008
    base = {f"attention.{name}.base_layer.weight": (hidden, hidden) for name in "qkvo"}
    base |= {f"mlp.{name}.weight": (inner, hidden) for name in ("gate", "up", "down")}
    adapters = {f"attention.{name}.lora_A.default.weight": (lora_rank, hidden) for name in "qkvo"}
    adapters |= {f"attention.{name}.lora_B.default.weight": (hidden, lora_rank) for name in "qkvo"}
    model = AdapterModel({name: torch.randn(shape).bfloat16() for name, shape in base.items()}, adapters)
    trained = sum(map(math.prod, adapters.values()))
    node, found, total = Node(place / "save"), [], 0
    try:
        with servers.moto(place) as moto, limited(moto.port, link_bytes_per_second) as link:
            attached = node.attached(store_at(link.endpoint, f"s3://{servers.BUCKET}/adapters"))
            for step in range(1, saves + 1):
                node.tag = f"global_step{step}"
                node.write_all()
                states = os.urandom(12 * trained // node.dp)
                node.write({OPTIM.format(d=rank): archive(states) for rank in range(node.dp)})
                model.save(node.save_dir / node.tag / MODEL)
                link.reset()
                assert node.upload(attached, node.order(node.sealed(step=step))).outcome == "committed"
                found.append(link.up_bytes)
                total = sum(path.stat().st_size for path in (node.save_dir / node.tag).iterdir())
                shutil.rmtree(node.save_dir / node.tag)
        return AdapterSaves(total, 14 * trained, tuple(found))
    finally:
        shutil.rmtree(place)


def adapters_table(found: AdapterSaves) -> str:
    """The part of the page that ten saves of one run were sent for."""
    first, *later = found.up_bytes
    figures = [
        ("one save", found.save_bytes),
        ("changed in each: adapters, their optimizer states", found.changed_bytes),
        ("up with the first", first),
        ("up with each later one, median", int(statistics.median(later))),
        (f"up with all {len(found.up_bytes)}", sum(found.up_bytes)),
        ("without copies", len(found.up_bytes) * found.save_bytes),
    ]
    lines = ["| of a LoRA run | MB |", "|---|---|"]
    return "\n".join(lines + [f"| {what} | {nbytes / 1e6:,.1f} |" for what, nbytes in figures])


def store_at(endpoint: str, url: str) -> S3Store:
    """Open and probe a store."""
    store = open_store(url, access=servers.access(endpoint))
    assert isinstance(store, S3Store)
    store.probe()
    return store


def planned_table(found: list[Share]) -> str:
    """The part of the page that is counted."""
    lines = ["| checkpoint | form | files | GB | sent, GB | sent |", "|---|---|---|---|---|---|"]
    for one in found:
        figures = f"{one.bytes / 1e9:,.1f} | {one.sent_bytes / 1e9:,.2f} | {one.sent_bytes / one.bytes:.1%}"
        lines.append(f"| {one.model.name} | {one.form} | {one.files:,} | {figures} |")
    return "\n".join(lines)


def measured_table(found: list[Measured]) -> str:
    """The part of the page that was sent and timed."""
    headings = "server | checkpoint | MB/s | GB | up, GB | up, of the form | down, GB | seconds"
    headings += " | up without copies, GB | seconds"
    lines = [
        f"Machine: {machine()}; servers on it; MB/s: of each connection, four are used.",
        "",
        f"| {headings} |",
        "|" + "---|" * (headings.count("|") + 1),
    ]
    for one in found:
        cells = [
            one.server,
            one.model.name,
            f"{one.link_bytes_per_second / 1e6:g}",
            f"{one.copied.bytes / 1e9:.2f}",
            f"{one.copied.up_bytes / 1e9:.2f}",
            f"{one.copied.up_bytes / one.copied.bytes:.1%}",
            f"{one.copied.down_bytes / 1e9:.2f}",
            f"{one.copied.seconds:.1f}",
            f"{one.sent.up_bytes / 1e9:.2f}",
            f"{one.sent.seconds:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for one in found:
        stage = one.model.name.partition(", ")[2].partition(",")[0]
        most_percent = 5 if one.model.stage < 3 else 8
        sent = 100 * one.copied.up_bytes / one.copied.bytes
        times = one.copied.seconds / one.sent.seconds
        for aim, limit, value in (
            (f"% of the form sent, at most {most_percent}", most_percent, f"{sent:.1f}"),
            (f"of the time without copies, at most {MOST_OF_THE_TIME}", MOST_OF_THE_TIME, f"{times:.2f}"),
        ):
            word = "reached" if float(value) <= limit else "NOT reached"
            pace = f"{one.link_bytes_per_second / 1e6:g} MB/s"
            lines.append(f"* {one.server}, {stage}, {pace}, {aim}: {value} ({word})")
    return "\n".join(lines)


def afar_table(server: str, found: dict[str, SentForm]) -> str:
    """The part of the page of nodes without shards; `found`: by the name of the checkpoint."""
    lines = [
        "| server | checkpoint | GB | up, GB | up, of the form | down, GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        figures = f"{one.bytes / 1e9:.2f} | {one.up_bytes / 1e9:.2f} | {one.up_bytes / one.bytes:.1%}"
        lines.append(f"| {server} | {name} | {figures} | {one.down_bytes / 1e9:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Plan all, measure one layer of each stage, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--links", type=float, nargs="+", default=[10e6, 2.5e6], help="bytes a second of each connection"
    )
    parser.add_argument("--planned", action="store_true", help="plan alone: nothing is uploaded")
    chosen = parser.parse_args()
    replace_part(planned_table([share for model in CASES for share in shares(model)]), "in_store")
    if not chosen.planned:
        if reason := ceph.missing():
            parser.error(reason)
        cases = [(name, model, link) for name in SERVERS for model in LAYERS for link in chosen.links]
        replace_part(measured_table([measured(*case) for case in cases]), "in_store, measured")
        afar = {m.name: sent_form("Ceph", m, chosen.links[0], copies=True, is_afar=True) for m in LAYERS}
        replace_part(afar_table("Ceph", afar), "in_store, afar")
        replace_part(adapters_table(adapter_saves(chosen.links[0])), "in_store, adapters")


if __name__ == "__main__":
    main()
