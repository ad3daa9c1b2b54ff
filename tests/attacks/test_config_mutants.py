"""Thousands of configurations that are wrong in one place: refused, with the key that was meant.

Every key with every single edit, values with wrong units and types, directories that overlap, and secrets
(P16, P15). The hand-picked ones are in tests/unit/config/test_config_corpus.py.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.loader import load_all, load_daemon, load_job
from ckptd.config.messages import toml_keys
from ckptd.config.schema import DaemonConfig, JobConfig, LocalConfig, RemoteConfig
from ckptd.config.section import LATER, Section
from ckptd.errors import ConfigError
from tests.attacks.figures import note
from tests.support.config_files import base, to_toml

__all__ = ["base"]

SECTIONS: dict[str, type[Section]] = {
    "": JobConfig,
    "local": LocalConfig,
    "remote": RemoteConfig,
    "daemon": DaemonConfig,
}
EVERYWHERE = {key for model in SECTIONS.values() for key in toml_keys(model)}
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def edits(word: str, rng: random.Random) -> set[str]:
    """Every deletion and every transposition of neighbours; each place with a letter put in, or replaced."""
    alphabet = string.ascii_lowercase
    places = range(len(word))
    return (
        {word[:i] + word[i + 1 :] for i in places}
        | {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]}
        | {word[:i] + rng.choice(alphabet) + word[i:] for i in places}
        | {word[:i] + rng.choice(alphabet) + word[i + 1 :] for i in places}
    ) - {word, ""}


def typos() -> Iterator[tuple[str, str, str]]:
    """(section, what was written, what was meant)."""
    rng = random.Random(20)
    for section, model in SECTIONS.items():
        for key in sorted(set(toml_keys(model)) - {"local", "remote"}):
            for word in sorted(edits(key, rng)):
                if word not in EVERYWHERE and word not in LATER:
                    yield section, word, key


def refused(path: Path, section: str) -> ConfigError | None:
    """The refusal; None: it was taken."""
    try:
        load_daemon(path, {}) if section == "daemon" else load_job(path)
    except ConfigError as error:
        return error
    return None


def put(data: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Into the section's table."""
    table = {"local": data["local"], "remote": data["remote"][0]}.get(section, data)
    table[key] = value


def fresh(base: dict[str, Any]) -> dict[str, Any]:
    """A copy of the right job file."""
    return {**base, "local": dict(base["local"]), "remote": [dict(base["remote"][0])]}


def test_every_edit_of_every_key(tmp_path: Path, base: dict[str, Any]) -> None:
    """All refused with the word that was written; the key that was meant is named in 95 of 100."""
    path = tmp_path / "job.toml"
    taken, unnamed, lost = [], [], []
    found = list(typos())
    for section, word, key in found:
        data: dict[str, Any] = {} if section == "daemon" else fresh(base)
        if section == "daemon":
            data[word] = "x"
        else:
            put(data, section, word, "x")
        path.write_text(to_toml(data))
        error = refused(path, section)
        if error is None or error.exit_code != 78:
            taken.append((section, word))
        elif word not in error.message or str(path) not in error.message:
            unnamed.append((section, word, error.message))
        elif f'"{key}"' not in str(error):
            lost.append((section, word, key, error.hint))
    note("F20-keys", "configuration: every edit of every key", runs=len(found), violations=len(taken))
    assert len(found) >= 2000
    assert not taken
    assert not unnamed
    assert len(lost) <= 0.05 * len(found), lost[:40]


DURATIONS = ("settle", "save_spread", "local.keep_every", "local.keep_within", "remote.keep_within")
SIZES = ("local.min_free", "remote.part_size", "daemon.memory_budget")
SPEEDS = ("remote.bandwidth", "daemon.bandwidth")
WHOLE = ("local.save_total_limit", "local.keep_every_steps", "remote.keep_last", "daemon.max_uploads")
NOT_A_DURATION = ("5", "5 s econds", "5sec5", "-5s", "5GB", "5GB/s", "٥s", "5s ago", "1e400s", "nans", "")
NOT_A_SIZE = ("5", "5Gib", "5 gigs", "-5GiB", "5s", "5GB/s", "5%%", "-1%", "101%", "0x10MiB", "")
NOT_A_SPEED = (
    "5",
    "5 Gbps/s",
    "-5GB/s",
    "0GB/s",
    "5GB",
    "5s",
    "5GB/",
    "/s",
    "5GB/s/s",
    "25:00,1GB/s",
    "1GB/h",
)
NOT_WHOLE: tuple[Any, ...] = ("3", 0, -1, 2.5, True, False, [], [3], {}, 1e9, "three")
NEVER: tuple[Any, ...] = (5, 5.5, True, [], ["5s"], {}, {"value": "5s"})
"""What no quantity is written as: quantities are strings with units."""


def test_values_with_wrong_units_and_types(tmp_path: Path, base: dict[str, Any]) -> None:
    """Refused with key and value."""
    path = tmp_path / "job.toml"
    wrong = [(k, v) for k in DURATIONS for v in (*NOT_A_DURATION, *NEVER)]
    wrong += [(k, v) for k in SIZES for v in (*NOT_A_SIZE, *NEVER)]
    wrong += [(k, v) for k in SPEEDS for v in (*NOT_A_SPEED, *NEVER)]
    wrong += [(k, v) for k in WHOLE for v in NOT_WHOLE]
    taken, unnamed = [], []
    for dotted, value in wrong:
        section, _, key = dotted.rpartition(".")
        data: dict[str, Any] = {} if section == "daemon" else fresh(base)
        if section == "daemon":
            data[key] = value
        else:
            put(data, section, key, value)
        if key.startswith("part_size"):
            data["remote"][0]["url"] = "s3://bucket/run"
        path.write_text(to_toml(data))
        error = refused(path, section)
        if error is None:
            taken.append((dotted, value))
        elif key not in error.message or "Traceback" in str(error):
            unnamed.append((dotted, value, error.message))
    note("F20-values", "configuration: wrong units and types", runs=len(wrong), violations=len(taken))
    assert not taken
    assert not unnamed


def _overlaps(root: Path) -> list[tuple[dict[str, dict[str, Any]], str]]:
    """Job files by name, and a word of the refusal; the last one of them is the wrong one."""

    def job(save_dir: str, url: str, **more: Any) -> dict[str, Any]:
        return {"save_dir": save_dir, "remote": [{"name": "nas", "url": url}], **more}

    run, nas = f"{root}/nvme/run", f"{root}/nas/run"
    for folder in (run, nas):
        Path(folder).mkdir()
    (root / "link").symlink_to(root / "nvme")
    (root / "nvme" / "real").mkdir(parents=True)
    (root / "nvme" / "linked").symlink_to(root / "nvme" / "real")
    good = job(run, nas)
    return [
        ({"a": job(run, f"{run}/nas")}, "inside"),
        ({"a": job(f"{nas}/run", nas)}, "inside"),
        ({"a": job(run, run)}, "save_dir"),
        ({"a": job(f"{root}/nvme/linked", nas)}, "symlink"),
        ({"a": good, "b": job(run, f"{root}/nas/b")}, "also save_dir"),
        ({"a": good, "b": job(f"{root}/link/run", f"{root}/nas/b")}, "also save_dir"),
        ({"a": good, "b": job(f"{root}/nvme/b", nas)}, "also remote"),
        ({"a": good, "b": job(f"{root}/nvme/b", f"{nas}/b")}, "inside"),
        ({"a": good, "b": job(f"{run}/b", f"{root}/nas/b")}, "inside"),
        ({"a": job(run, nas, name="x"), "b": job(f"{root}/nvme/b", f"{root}/nas/b", name="x")}, "taken"),
    ]


@pytest.mark.parametrize("number", range(10))
def test_places_that_overlap_and_names_that_are_taken(tmp_path: Path, number: int) -> None:
    """save_dir, remote and state directory of all jobs are apart, also through links (P15)."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nas").mkdir()
    jobs, words = _overlaps(tmp_path)[number]
    (tmp_path / "etc" / "jobs.d").mkdir(parents=True)
    for name, data in jobs.items():
        (tmp_path / "etc" / "jobs.d" / f"{name}.toml").write_text(to_toml(data))
    loaded = load_all(tmp_path / "etc", {})
    assert [path.stem for path, _ in loaded.problems] == [list(jobs)[-1]]
    assert words in str(loaded.problems[0][1])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("remote", "url", f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/run"),
        ("remote", "url", f"sftp://user:{SECRET}@host/path"),
        ("remote", "credentials", f"AKIAIOSFODNN7EXAMPLE:{SECRET}"),
        ("remote", "credentials", SECRET),
        ("remote", "aws_secret_access_key", SECRET),
        ("remote", "secret", SECRET),
        ("remote", "endpoint_url", f"https://user:{SECRET}@host"),
        ("remote", "endpoint_url", f"https://host?token={SECRET}"),
        ("remote", "sse_customer_key", SECRET),
        ("remote", "tags", [f"password={SECRET}", "AKIAIOSFODNN7EXAMPLE=x"]),
        ("", "token", SECRET),
        ("", "password", SECRET),
        ("local", "api_key", SECRET),
    ],
)
def test_a_secret_in_a_file_is_refused_and_never_repeated(
    tmp_path: Path, base: dict[str, Any], section: str, key: str, value: Any
) -> None:
    """P15."""
    put(base, section, key, value)
    path = tmp_path / "job.toml"
    path.write_text(to_toml(base))
    error = refused(path, section)
    assert error is not None
    assert SECRET not in f"{error.message} {error.hint} {error!r}"
