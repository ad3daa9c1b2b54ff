"""Prove what a job needs: rights on the node, remotes and their abilities, the child processes.

A remote is asked through its own child process, so that a dead mount costs a time-out and not the command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ckptd import errors
from ckptd.base import files
from ckptd.base.humanize import ago, size_of
from ckptd.base.owned_dirs import lies_in_save_dir
from ckptd.config.budget import MIB, child_bytes, divide, shortage
from ckptd.config.commands import node_name
from ckptd.config.remote_names import shown_remote
from ckptd.conversion.engine.inspect import probe_restrictions
from ckptd.core.model.heartbeat import BEAT_SECONDS
from ckptd.core.model.records import ZERO
from ckptd.core.model.runs import short
from ckptd.errors import (
    CkptdError,
    ConfigError,
    LockHeld,
    NotPermitted,
    RefusedError,
    RemoteNotInitialised,
    from_os_error,
)
from ckptd.recover.select.job import owner_of, settings_to_ask
from ckptd.recover.select.runs import held_by
from ckptd.storage.child.client import attach_once
from ckptd.storage.local.planned_uploads import planned_uploads
from ckptd.storage.local.probe import Finding, failed, probe_save_dir
from ckptd.storage.local.run_file import host_name
from ckptd.storage.local.scan import scan
from ckptd.storage.local.state_dir import filesystem_type, is_network, state_base, state_dir_of
from ckptd.storage.remote.attach import NEXT_STEP, are_one, one_place
from ckptd.storage.remote.heartbeats import MOST_READ_AGAIN, READ_AGAIN_SECONDS, other_writers
from ckptd.storage.remote.heartbeats import NEXT_STEP as IS_OWN_RUN
from ckptd.storage.stores.access import access_of, credentials_path
from ckptd.storage.stores.open import is_s3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptd.config.schema import DaemonConfig, JobConfig, RemoteConfig
    from ckptd.core.model.heartbeat import SeenNode
    from ckptd.core.model.listing import SaveDirListing
    from ckptd.recover.select.job import Owner
    from ckptd.storage.remote.messages import Attached
    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.base import Abilities


# --- rows about a remote ---------------------------------------------------------------------------------

_PROOFS = {
    "store-checksum": "store-checksum: the store computes CRC64NVME, keeps it and refuses a wrong one",
    "part-etags": "part-etags: its ETags are the MD5s of what arrived, compared with what was sent",
    "read-back": "read-back: each object is read again and compared",
}


def settings_rows(remote: RemoteConfig, access: Access) -> tuple[tuple[str, str], ...]:
    """List what the job file says about reaching a remote; never a secret, only where secrets lie."""
    if not is_s3(remote.url):
        return ()
    if access.client == "s3fs" and access.endpoint_url is None and access.sign_payload is None:
        # the endpoint may stand in s3fs's own settings
        signed = "signed with SHA-256 over plain http to another machine, else not"
    elif access.signs_payload:
        saved = "" if access.sign_payload else "; sign_payload = false saves some 3 CPU-seconds per GB"
        signed = f"signed with SHA-256{saved}"
    elif access.is_tls:
        signed = "not signed: TLS protects them"
    else:
        signed = "not signed: plain http"
    rows = [(key, value) for key, value in access.shown() if key != "sign_payload"]
    return (*rows, ("bodies", signed))


def abilities_rows(can: Abilities, *, is_read_back: bool) -> tuple[tuple[str, str], ...]:
    """List what the probe saw."""
    proof = _PROOFS[can.proof] if is_read_back or can.checksum else 'none: verify = "none"'
    rows = [
        ("create-only", "enforced by the store" if can.create_only else "looked at first, read again after"),
        ("proof", proof),
        ("a part that changed on its way", _guard(can)),
        ("an upload that was cut short", "goes on" if can.resumable else "starts over"),
    ]
    if can.part_etags or can.content_md5 or can.checksum or can.complete_only_absent:
        joins = "refused by the store" if can.complete_only_absent else "looked for first"
        rows.append(("joining parts over an object", joins))
        rows.append(("bytes that lie there already", "copied by the store" if can.copies else "sent again"))
    return tuple(rows)


def _guard(can: Abilities) -> str:
    if can.checksum:
        return f"refused by the store ({can.checksum})"
    if can.part_etags:
        return "seen in the part's ETag, sent again at once"
    if can.content_md5:
        return "refused by the store (Content-MD5)"
    return "found when the object is read back"


_MINUTES_PER_MONTH = 43_800
_PUT_USD, _GET_USD = 5e-6, 0.4e-6
"""Price of one request in the first tier of AWS and Google: of PUT and LIST, of GET and HEAD."""
_PAGE = 1000
_KEPT = 6
"""Manifests of a node that lie in a remote: three checkpoints, of ZeRO and universal form."""


def requests_at_rest(nodes: int, documents: int) -> tuple[int, int]:
    """Return how many requests a node sends in a minute in which nothing is to do, while `nodes` save into
    a remote of so many `documents` (objects below `_ckptd/`): those priced as PUT and LIST, and as GET.

    One look at the remote (identity, tombstones, all other documents, two pointers) and one heartbeat
    (identity, ours before and after it is written, everybody's listed, some read).
    """
    lists = 1 + -(-max(documents, 1) // _PAGE) + -(-nodes // _PAGE)
    others = min(round((nodes - 1) * BEAT_SECONDS / READ_AGAIN_SECONDS), MOST_READ_AGAIN)
    return lists + 1, 3 + 3 + others


def requests_row(remote: RemoteConfig, access: Access) -> tuple[tuple[str, str], ...]:
    """Say what the daemon's requests cost a month, on a store that has them paid."""
    if not remote.url.startswith(("s3://", "gs://", "gcs://")) or access.endpoint_url is not None:
        return ()
    said = []
    for nodes in (1, 64, 1000):
        puts, gets = requests_at_rest(nodes, nodes * (_KEPT + 1))
        usd = nodes * _MINUTES_PER_MONTH * (puts * _PUT_USD + gets * _GET_USD)
        said.append(f"{usd:,.0f} USD a month for {nodes:,} node{'s' * (nodes > 1)}")
    puts, gets = requests_at_rest(1, _KEPT)
    price = f"{_PUT_USD * 1000:g} and {_GET_USD * 1000:g} USD per 1,000"
    rest = f"{puts} of PUT and LIST, {gets} of GET and HEAD a minute at rest; at {price} {', '.join(said)}"
    return (("requests", f"{rest}; an upload sends one for each file and each 16 MiB"),)


# --- the checks of a job ---------------------------------------------------------------------------------

REMOTE_SECONDS = 30.0
_WANTED_RESTRICTIONS = ("rlimits", "no-new-privs", "no-network")


def check_job(
    job: JobConfig,
    daemon: DaemonConfig,
    environ: Mapping[str, str],
    *,
    jobs_in_daemon: int = 1,
    writes: bool = True,
    init_remote: bool = False,
) -> Iterator[Finding]:
    """Yield the findings, in the order of a table; nothing that was made stays but, with `init_remote`,
    remote.json.
    """
    yield from probe_save_dir(
        job.save_dir, job.local.min_free, writes=writes, trainer=job.trainer, declared=job.declared
    )
    if (listing := _listed(job)) is not None:
        yield from planned_uploads(job, listing, _state_dir(job, daemon, environ, jobs_in_daemon))
    yield _state(job, daemon, environ, jobs_in_daemon)
    if job.shared_fs:
        yield _shared(job, _state_dir(job, daemon, environ, jobs_in_daemon))
    owner = owner_of(job, _state_dir(job, daemon, environ, jobs_in_daemon))
    seen: dict[str, Attached] = {}
    for remote in job.remotes:
        yield from _remote(job, remote, owner, seen, writes=writes, init_remote=init_remote)
        if ZERO not in remote.forms and not job.shared_fs:
            yield _without_zero(remote)
    yield _children()


def _listed(job: JobConfig) -> SaveDirListing | None:
    """List save_dir; None: it cannot be read, which the rows about it say."""
    try:
        with files.opened_dir(job.save_dir) as fd:
            return scan(fd, job.trainer, declared=job.declared)
    except OSError:
        return None


def check_glob(daemon: DaemonConfig, environ: Mapping[str, str]) -> Finding:
    """Check a glob in save_dir that matches no directory yet: its jobs will need a place for their state."""
    try:
        state_base(daemon.state_dir, environ, 2)
    except CkptdError as error:
        return failed("state", error)
    text = "no directory matches yet; each that appears becomes a job (nothing can be proved until then)"
    return Finding(what="save_dir", verdict="note", text=text)


def check_memory(jobs: Sequence[JobConfig], daemon: DaemonConfig) -> Finding | None:
    """Judge whether `memory_budget` suffices for all jobs of a daemon (P12); None: nothing waits for
    memory."""
    budget_bytes = daemon.memory_budget_bytes(psutil.virtual_memory().total)
    remotes = [[child_bytes(remote.url, remote.client) for remote in job.remotes] for job in jobs]
    shares = divide(budget_bytes, remotes, daemon.max_uploads)
    if (found := shortage(shares, budget_bytes)) is not None:
        return failed("memory", ConfigError(found[0], hint=found[1]))
    if budget_bytes >= shares.roomy_bytes:
        return None
    budget, roomy = (f"{-(-count // MIB)}MiB" for count in (budget_bytes, shares.roomy_bytes))
    count = sum(map(len, remotes))
    text = f"{budget}: at once {shares.uploads} uploads, and {shares.children} of {count} remotes"
    hint = f'with memory_budget = "{roomy}" none waits for want of it'
    return Finding(what="memory", verdict="note", text=text, hint=hint)


def _shared(job: JobConfig, state_dir: Path | None) -> Finding:
    if state_dir is not None and lies_in_save_dir(state_dir, job.save_dir):
        hint = "set state_dir in ckptd.toml to a directory on this host's own disk"
        return failed("shared", ConfigError(f"state_dir {state_dir} lies in the shared save_dir", hint=hint))
    meets = next(shown_remote(r.name, r.url) for r in job.remotes if r.required)
    text = f"files are divided by name among the hosts; the lease in {meets} says who deletes and converts; "
    text += f"a host silent for {job.shared_takeover_seconds:.0f} s is replaced (`ckptd status` names them)"
    return Finding(what="shared", verdict="ok", text=text)


def _state_dir(
    job: JobConfig, daemon: DaemonConfig, environ: Mapping[str, str], jobs_in_daemon: int
) -> Path | None:
    with contextlib.suppress(CkptdError, OSError):
        return state_dir_of(job.save_dir, job.name, daemon.state_dir, environ, jobs_in_daemon=jobs_in_daemon)
    return None


def _state(job: JobConfig, daemon: DaemonConfig, environ: Mapping[str, str], jobs_in_daemon: int) -> Finding:
    try:
        place = state_dir_of(job.save_dir, job.name, daemon.state_dir, environ, jobs_in_daemon=jobs_in_daemon)
    except CkptdError as error:
        return failed("state", error)
    except OSError as error:
        return failed("state", from_os_error(error, f"looking for {error.filename}"))
    existing = next(path for path in (place, *place.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return failed("state", errors.NotPermitted(f"{place}: {existing} cannot be written"))
    kind = filesystem_type(existing)
    if is_network(kind):
        hint = "set state_dir in ckptd.toml to a directory on a local disk"
        return Finding(what="state", verdict="note", text=f"{place} is on {kind}", hint=hint)
    return Finding(what="state", verdict="ok", text=f"{place} ({kind or 'unknown'} file system)")


def _remote(
    job: JobConfig,
    remote: RemoteConfig,
    owner: Owner,
    seen: dict[str, Attached],
    *,
    writes: bool,
    init_remote: bool,
) -> Iterator[Finding]:
    what, access = shown_remote(remote.name, remote.url), access_of(remote)
    if not writes:
        rows = (*settings_rows(remote, access), *requests_row(remote, access))
        yield Finding(what=what, verdict="note", text=f"{remote.url}: not tried (--no-probe)", rows=rows)
        return
    settings = settings_to_ask(job, remote, owner)
    asked = {"may_initialise": init_remote, "proposed_job_id": _job_id(owner, seen), "asks_who_lives": True}
    settings = settings.model_copy(update=asked)
    answer = attach_once(settings, REMOTE_SECONDS)
    if isinstance(answer, CkptdError):
        yield _absent(what, remote, answer)
        return
    if (error := _same_directory(job, remote, answer, seen)) is not None:
        yield failed(what, error)
        return
    seen[remote.name] = answer
    yield from _who_writes(what, job, remote, owner, answer)
    made = "made this job's remote" if answer.initialised else f"is job {answer.identity.job}'s"
    free = f", {size_of(answer.free_bytes)} free" if answer.free_bytes is not None else ""
    text = f"{remote.url} is there, {made} (id {answer.identity.remote_id[:8]}), can be written{free}"
    yield Finding(what=what, verdict="ok", text=text)
    can = answer.abilities
    exclusive = "create-only writes are enforced" if can.create_only else "no create-only writes"
    is_read_back = remote.verify != "none"
    proof = can.proof if is_read_back or can.checksum else "nothing"
    notes = "".join(f"; {note}" for note in can.notes)
    text = f"{exclusive}; verified by {proof}; bandwidth {remote.bandwidth.shown(time.time())}{notes}"
    hint = "" if can.create_only else "only one node may write there"
    if job.shared_fs and not can.create_only:
        yield failed("shared", RefusedError(f"{remote.url}: {exclusive}", hint=f"{hint}: no shared_fs"))
    seen_rows = abilities_rows(can, is_read_back=is_read_back)
    rows = (*settings_rows(remote, access), *seen_rows, *requests_row(remote, access))
    yield Finding(what=what, verdict="ok" if can.create_only else "note", text=text, hint=hint, rows=rows)


def _job_id(owner: Owner, seen: Mapping[str, Attached]) -> str | None:
    """Return the job's id by a remote that it has already: one that is made now gets no other."""
    known = (*(answer.identity.job_id for answer in seen.values()), *owner.job_ids.values())
    return next(iter(known), None)


def _who_writes(
    what: str, job: JobConfig, remote: RemoteConfig, owner: Owner, answer: Attached
) -> Iterator[Finding]:
    """Yield who else writes there: another run that lives is a fault, before this one has sent anything."""
    if job.shared_fs:
        return
    here = (host_name(), str(job.save_dir))
    held, newest = held_by(job.save_dir), answer.newest
    unnamed: list[SeenNode] = []
    for seen in answer.living:
        beat = seen.heartbeat
        if beat is None or not beat.save_dir:
            unnamed.append(seen)
            continue
        if (beat.host, beat.save_dir) == here or beat.run_id == held is not None:
            continue
        if held is None and (newest is None or not newest.is_whole or newest.run_id != beat.run_id):
            unnamed.append(seen)  # perhaps another node of this very run, which has not begun here
            continue
        whose = f"{beat.user}@{beat.host}:{beat.save_dir}"
        run = f"run {short(beat.run_id)}" if beat.run_id is not None else "another run"
        heard = ago(seen.seconds_ago or 0.0)
        msg = f"{whose} saves {run} to {remote.url} under the name {job.name}, heard of {heard} ago"
        hint = 'only one of two runs sends there: give this one name = "…" and a url of its own'
        yield failed(what, LockHeld(msg, hint=hint))
    own = job.node_name or node_name(os.environ)
    others = [seen for seen in unnamed if seen.node != own]
    if others and remote.name not in owner.job_ids:
        text = other_writers(others, remote.url, answer.identity.created)
        yield Finding(what=what, verdict="note", text=text, hint=IS_OWN_RUN)


def _same_directory(
    job: JobConfig, remote: RemoteConfig, answer: Attached, seen: Mapping[str, Attached]
) -> ConfigError | None:
    """Return an error where a remote is the same directory as another one: two paths to it are one copy."""
    for other in job.remotes:
        if other.name in seen and are_one(seen[other.name], answer):
            return ConfigError(one_place(remote.url, other.name, other.url), hint=NEXT_STEP)
    return None


def _without_zero(remote: RemoteConfig) -> Finding:
    text = (
        f"takes no ZeRO form: {', '.join(remote.forms)} of saves that lie whole on a node, nothing of saves "
    )
    text += "that are spread over the disks of several"
    hint = 'several nodes with disks of their own: list "zero" among its forms, the others are made of it'
    return Finding(what=shown_remote(remote.name, remote.url), verdict="note", text=text, hint=hint)


def _absent(what: str, remote: RemoteConfig, error: CkptdError) -> Finding:
    """Return the finding for a place that could become the remote: no failure before the first start.

    The remote's child looked at the place (`attach`): no path of a remote is touched here (docs/adr/0182).
    """
    if isinstance(error, RemoteNotInitialised):
        text = f"{remote.url} is not initialised yet; `ckptd run` or `ckptd check --init-remote` does it"
        return Finding(what=what, verdict="note", text=text)
    return failed(what, error)


def _children() -> Finding:
    try:
        held = probe_restrictions()
    except CkptdError as error:
        return failed("children", error)
    missing = [name for name in _WANTED_RESTRICTIONS if name not in held]
    text = f"readers of pickles run with: {', '.join(held) or 'nothing'}"
    if missing:
        hint = (
            "this kernel gives an ordinary user no network namespace; the inert unpickler holds all the same"
        )
        return Finding(
            what="children", verdict="note", text=f"{text}; without {', '.join(missing)}", hint=hint
        )
    return Finding(what="children", verdict="ok", text=text)


# --- the checks of ckptd.toml: notifications and metrics -------------------------------------------------
# An alarm that nobody hears is found out when it was needed. Nothing is sent and no program is run here.

_PROGRAMS = ("command", "on_complete", "on_committed", "on_converted", "on_pruned", "on_problem")
_URL_LIMIT_BYTES = 4096


def check_outlets(daemon: DaemonConfig, *, writes: bool) -> Iterator[Finding]:
    """Yield a finding for each place, program and page that is set; with `writes` a port is opened for a
    moment.
    """
    notify = daemon.notify
    for key, place in (("webhook", notify.webhook), ("heartbeat", notify.heartbeat)):
        if place is not None and place.startswith("file:"):
            yield _url_in(key, place.removeprefix("file:"))
    for key in _PROGRAMS:
        argv: tuple[str, ...] = getattr(notify, key)
        if argv:
            yield _program(key, argv[0])
    if daemon.metrics is not None:
        yield _folder(daemon.metrics) if daemon.metrics.startswith("/") else _port(daemon.metrics, writes)


def _url_in(key: str, given: str) -> Finding:
    """Check a URL that is a secret: it is looked at and never shown."""
    if not given.startswith("/") and not os.environ.get("CREDENTIALS_DIRECTORY"):
        return Finding(
            what=key, verdict="note", text=f"{given} is a credential that systemd gives the service"
        )
    try:
        path = credentials_path(given)
        with open(path, "rb") as source:
            is_url = source.read(_URL_LIMIT_BYTES).strip().startswith((b"http://", b"https://"))
    except CkptdError as error:
        return failed(key, error)
    except OSError as error:
        return failed(key, _wrong(error, f"reading {error.filename}"))
    if not is_url:
        return failed(key, ConfigError(f"{path} holds no URL", hint="one line: https://…"))
    return Finding(what=key, verdict="ok", text=f"{path} holds a URL (nothing was sent)")


def _program(key: str, path: str) -> Finding:
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return failed(key, _wrong(error, f"looking at {path}"))
    if not is_file or not os.access(path, os.X_OK, effective_ids=True):
        return failed(key, NotPermitted(f"{path} cannot be run", hint=f"chmod +x {path}, or correct {key}"))
    return Finding(what=key, verdict="ok", text=f"{path} can be run (it was not)")


def _folder(path: str) -> Finding:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return failed("metrics", ConfigError(f"{folder} is no directory", hint="make it, or correct metrics"))
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        hint = "let the user that ckptd runs as write there"
        return failed("metrics", NotPermitted(f"{folder} cannot be written", hint=hint))
    return Finding(what="metrics", verdict="ok", text=f"{folder} can be written")


def _port(where: str, writes: bool) -> Finding:
    if not writes:
        return Finding(what="metrics", verdict="note", text=f"{where}: not tried (--no-probe)")
    host, _, port = where.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            one.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is in use: by the daemon itself, if it runs"
            return Finding(what="metrics", verdict="note", text=text)
        return failed("metrics", _wrong(error, f"opening {where}"))
    return Finding(what="metrics", verdict="ok", text=f"{where} can be opened")


def _wrong(error: OSError, what: str) -> CkptdError:
    """Translate an OSError; a path or host that is not there is a wrong name in ckptd.toml."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | socket.gaierror):
        return ConfigError(f"{what}: {error.strerror}", hint="make it, or correct ckptd.toml")
    wrong = from_os_error(error, what)
    wrong.hint = "let the user that ckptd runs as use it" if isinstance(wrong, NotPermitted) else wrong.hint
    return wrong
