"""Five hundred wrong configurations: each is refused with file, key, value and what was meant (P16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.config.messages import toml_keys
from ckptd.config.schema import DaemonConfig, JobConfig, LayoutConfig, LocalConfig, RemoteConfig
from ckptd.config.section import LATER, Section
from tests.support.config_files import DATE, base, refusal, write

__all__ = ["base"]


def wrong_ladders(not_made: str) -> list[Any]:
    """Of a tier that never has the form `not_made`."""
    return [
        5,
        True,
        "universal",
        {},
        DATE,
        ["universal"],
        [{"after": "2d"}],
        [{"form": "gone"}],
        [{"after": "2", "form": "gone"}],
        [{"after": -1, "form": "gone"}],
        [{"after": True, "form": "gone"}],
        [{"after": 2.5, "form": "gone"}],
        [{"after": "2d", "form": "zero"}],
        [{"after": "2d", "form": "univ"}],
        [{"after": "2d", "form": not_made}],
        [{"after": "2d", "form": "universal"}, {"after": "2d", "form": "gone"}],
        [{"after": "2d", "form": "universal"}, {"after": 5, "form": "gone"}],
        [{"after": "2d", "form": "gone"}, {"after": "3d", "form": "universal"}],
        [{"after": "2d", "form": "universal", "keep": 1}],
    ]


SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("", JobConfig),
    ("layout", LayoutConfig),
    ("local", LocalConfig),
    ("remote", RemoteConfig),
)
WRONG: dict[str, list[Any]] = {
    "save_dir": [5, True, [], {}, DATE, "relative/path", "", "/", "/a/../b", "/nvme/runs/*", "s3://b/x"],
    "trainer": [5, True, [], "", "pytorch", "hf", "Lightning", "composer", DATE],
    "settle": [5, -1, 5.0, True, [], {}, "", "5", "-5s", "5 seconds", "fast", "5GB", "1s1h", DATE],
    "existing": [5, True, [], "", "newst", "ALL", DATE],
    "unuploaded": [5, True, [], "", "keeep", "remove", "Thin", DATE],
    "extra": [5, True, "tokenizer*", [5], ["a/b"], [""], ["_ckptd"], {}, DATE],
    "name": [5, True, [], "", "a b", "a/b", ".hidden", "-x", "ä", DATE],
    "save_spread": [5, True, [], "", "60", "-60s", "60 s", DATE],
    "metric": [5, True, [], "", "a b", DATE],
    "metrics_file": [5, True, [], {}, "", "/var/log/m.jsonl", "../m.jsonl", "_ckptd/m.jsonl", "a//b", DATE],
    "metric_mode": [5, True, [], "", "lower", "MIN", DATE],
    "node_name": [5, True, [], "", "a b", DATE],
    "ready_dir": [5, True, [], {}, "", "ready", "~/ready", "/a/../b", "{dir}", DATE],
    "shared_fs": [5, "false", [], DATE],
    "compare_masters": [1, 0, "true", "no", [], {}, "", DATE],
    "shared_takeover": [5, True, [], {}, "", "5s", "-1m", "never", DATE],
    "layout.files": [5, True, [], {}, "", "a/b", "_ckptd*", DATE],
    "layout.complete_when": [
        *(5, True, [], {}, DATE, "", "marker", "manifest", "quiet", "quiet 0s", "quiet soon", "sometimes"),
        *("marker ../DONE", "manifest /etc/x", "marker a//b"),
    ],
    "local.forms": [5, True, "universal", ["zero"], ["weights-bf16"], ["univ"], {}, DATE],
    "local.scrub": [5, True, "", "50GB", "50GB/s", "0GB/day", "/day", "fast", DATE],
    "local.save_total_limit": [0, -1, 2.5, True, "3", [], {}, DATE],
    "local.keep_last": [0, -1, 2.5, True, "3", [], {}, DATE],
    "local.keep_bytes": [0, -1, 5, True, "", "2", "0B", "5%", "many", [], {}, DATE],
    "local.keep_every_steps": [0, -5, 2.5, True, "5000", [], DATE],
    "local.keep_steps": [5, True, "100", ["100"], [-1], [1.5], {}, DATE],
    "local.keep_every": [0, True, "6", "0s", "-6h", [], {}, DATE],
    "local.keep_within": [0, True, "2", "0d", "-2d", [], {}, DATE],
    "local.ephemeral": [
        5,
        True,
        "x",
        [],
        DATE,
        {"every_steps": 0, "keep": 1},
        {"every_steps": 5, "keep": -1},
    ],
    "local.ladder": wrong_ladders("weights-bf16"),
    "local.keep_best": [0, -1, 1.5, True, "2", [], {}, DATE],
    "local.min_free": [5, 0.05, True, [], "", "5", "-5%", "105%", "5 percent", "5Gb", "many", DATE],
    "remote.name": [5, True, [], "", "a b", "a/b", DATE],
    "remote.url": [
        5,
        True,
        [],
        "",
        "relative",
        "s3://bucket",
        "s3://bucket/",
        "s3://Bucket_/x",
        "s3://bucket/a/../b",
        "s3://bucket/x?version=1",
        "gs://b",
        "gs://b/x?y=1",
        "sftp://h",
        "sftp://h/",
        "sftp://h/~/x",
        "sftp://h/a/../b",
        "sftp://h:port/x",
        "sftp:///x",
        "ftp://h/x",
        "https://h/x",
        "memory://h/x",
        "simplecache::sftp://h/x",
        "nothing://h/x",
        "/",
        "/a/../b",
        DATE,
    ],
    "remote.forms": [5, True, "zero", [], ["universal"], ["zero", "zero"], ["weights-bf16"], ["raw"], DATE],
    "remote.required": [5, "true", "yes", [], DATE],
    "remote.bandwidth": [5, 1e9, True, [], "", "8", "8Gb", "fast", "0B/s", "-1GB/s", "8 GB per s", DATE],
    "remote.same_filesystem": [1, "true", [], DATE],
    "remote.verify": [5, True, [], "", "read_back", "crc", "none", DATE],
    "remote.endpoint_url": [
        5,
        True,
        "",
        "host:9000",
        "s3://host",
        "http://host?x",
        "http://",
        DATE,
    ],
    "remote.client": [5, True, "", "boto3", "S3FS", DATE],
    "remote.storage_options": [
        *(5, True, "anon", ["anon"], {"asynchronous": True}, {"session": "x"}, {"when": DATE}, DATE),
        *({"secret": "x"}, {"client_kwargs": {"aws_secret_access_key": "x"}}, ["key=x"]),
    ],
    "remote.region": [5, True, "", "eu west", DATE],
    "remote.credentials": [
        *(
            5,
            True,
            "",
            "profile:",
            "file:",
            "file:a/keys",
            "file:../keys",
            "file:$HOME",
            "AKIA123:secret",
            DATE,
        ),
    ],
    "remote.addressing": [5, True, "", "PATH", "virtual-host", DATE],
    "remote.role_arn": [5, True, "", "ckptd", "arn:aws:iam::1:user/x", "arn:aws:s3:::bucket", DATE],
    "remote.external_id": [5, True, "", "x", "two words", DATE],
    "remote.sts_endpoint_url": [5, True, "", "host:9000", "http://host?x", DATE],
    "remote.sse": [5, True, "", "AES", "aes256", "kms", "aws:kms:dsse", DATE],
    "remote.sse_kms_key_id": [5, True, "", "a key", "-x", DATE],
    "remote.storage_class": [5, True, "", "standard", "STANDART_IA", "GLACIER", "DEEP_ARCHIVE", DATE],
    "remote.tags": [5, True, "team", ["team"], [5], ["aws:x=y"], ["=x"], ["a=?"], ["a=1", "a=2"], DATE],
    "remote.sign_payload": [1, "true", [], DATE],
    "remote.scrub": [5, True, "", "50GB", "50GB/s", "0GB/day", "/day", "fast", DATE],
    "remote.part_size": [5, True, "", "1MiB", "6GiB", "16", "many", DATE],
    "remote.save_total_limit": [0, -1, 2.5, True, "3", [], DATE],
    "remote.keep_last": [0, -1, 2.5, True, "3", [], DATE],
    "remote.keep_bytes": [0, 5, True, "", "2", "0B", "5%", "many", [], DATE],
    "remote.keep_every_steps": [0, -5, 2.5, True, "5000", DATE],
    "remote.keep_steps": [5, True, "100", ["100"], [-1], {}, DATE],
    "remote.keep_best": [0, -1, 1.5, True, "2", [], {}, DATE],
    "remote.keep_every": [0, True, "6", "0s", "-6h", [], {}, DATE],
    "remote.keep_within": [0, True, "2", "0d", "-2d", [], {}, DATE],
    "remote.ephemeral": [
        5,
        True,
        "x",
        [],
        DATE,
        {"every_steps": 0, "keep": 1},
        {"every_steps": 5, "keep": -1},
    ],
    "remote.ladder": wrong_ladders("weights-fp32"),
    "layout": [5, True, "model_*.pt", [], DATE],
    "local": [5, True, "universal", DATE],
    "remote": [5, True, "nas", DATE],
}
LATER_KEYS = {
    "": ["run_id_env", "incomplete_after"],
    "remote": ["abort_after"],
}
NEIGHBOURS = {
    "": "output_dir>save_dir checkpoint_dir>save_dir ckpt_dir>save_dir dirpath>save_dir "
    "keep>save_total_limit max_to_keep>save_total_limit num_checkpoints_to_keep>save_total_limit "
    "min_free_space>min_free bucket>url destination>url dest>url formats>forms",
    "local": "keep>save_total_limit max_to_keep>save_total_limit keep_n>save_total_limit settle>settle "
    "total_limit>save_total_limit interval>keep_every_steps bucket>url url>url bandwidth>bandwidth",
    "remote": "force_path_style>addressing storageclass>storage_class kms_key_id>sse_kms_key_id "
    "server_side_encryption>sse labels>tags role>role_arn payload_signing>sign_payload "
    "bucket>url destination>url path>url dest>url bwlimit>bandwidth same_fs>same_filesystem "
    "save_dir>save_dir min_free>min_free",
}
"""Words of other tools > the key that the refusal must name."""
SECRETS = ["access_key", "aws_secret_access_key", "password", "token", "secret", "api_key"]


def typos(key: str) -> list[str]:
    """Spellings of one key that people make."""
    middle = len(key) // 2
    made = {
        key[:-1], key[1:], key + key[-1], key + "s", key.upper(), key.capitalize(), key.replace("_", "-"),
        key.replace("_", ""), key[:middle] + key[middle + 1 :],
        key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :],
    }  # fmt: skip
    return sorted(m for m in made if m and m != key)


def mutants() -> list[tuple[str, str, Any, str]]:
    """(section, key, value, what the refusal must name)."""
    made: list[tuple[str, str, Any, str]] = []
    for dotted, values in WRONG.items():
        section, _, key = dotted.rpartition(".")
        made += [(section, key, value, key) for value in values]
    for section, model in SECTIONS:
        valid = set(toml_keys(model))
        for key in sorted(valid - {"layout", "local", "remote"}):
            known = valid | set(LATER) | set(toml_keys(DaemonConfig))
            made += [(section, typo, "x", f'"{key}"') for typo in typos(key) if typo not in known]
    for section, keys in LATER_KEYS.items():
        made += [(section, key, value, "not in this version") for key in keys for value in ("x", 2)]
    for section, words in NEIGHBOURS.items():
        pairs = [word.split(">") for word in words.split()]
        made += [(section, word, "x", f'"{key}"') for word, key in pairs]
    made += [("", key, "x", "belongs in ckptd.toml") for key in ("metrics", "max_uploads")]
    made += [(section, key, "hunter2", "secret") for section in ("", "local", "remote") for key in SECRETS]
    return made


MUTANTS = mutants()

HINTS: list[tuple[str, str, Any, str]] = [
    ("", "save_total_limit", 3, '"save_total_limit" belongs in [local] or [[remote]]'),
    ("", "forms", [], '"forms" belongs in [local] or [[remote]]'),
    ("", "unploaded", "thin", 'did you mean "unuploaded"?'),
    ("local", "bandwidth", "1MB/s", '"bandwidth" belongs in [[remote]] or ckptd.toml'),
    ("local", "ephemeral", {"every_step": 100, "keep": 2}, 'did you mean "every_steps"?'),
    ("remote", "ephemeral", {"every_steps": 100, "keeps": 2}, 'did you mean "keep"?'),
    ("local", "ladder", [{"after": 1, "forms": "gone"}], 'did you mean "form"?'),
    ("remote", "ladder", [{"after": 1, "settle": 2}], "valid keys here: after, form"),
]
"""What is misspelt or misplaced → where it is said to belong."""


@pytest.mark.parametrize(("section", "key", "value", "hint"), HINTS)
def test_hints_say_where_a_key_belongs(
    tmp_path: Path, base: dict[str, Any], section: str, key: str, value: Any, hint: str
) -> None:
    target = base if not section else base["local"] if section == "local" else base["remote"][0]
    target[key] = value
    assert refusal(write(tmp_path, base)).hint == hint


def test_all_mistakes_are_said_at_once(tmp_path: Path, base: dict[str, Any]) -> None:
    """One a time, a file with five took five tries. A key that is spelt wrong is not missing as well."""
    base["settle"] = "5 sekunden"
    base["remote"][0]["badnwidth"] = "1MB/s"
    base["local"]["save_totl_limit"] = 3
    error = refusal(path := write(tmp_path, base))
    assert error.message.startswith(f"{path}: 3 mistakes: (1) ")
    assert 'remote[0].badnwidth = "1MB/s": no such key; (3) settle = "5 sekunden": ' in error.message
    assert "(1) local.save_totl_limit = 3: no such key; (2) " in error.message
    assert error.message.count(str(path)) == 1
    assert 'did you mean "bandwidth"? ' in error.hint
    assert "(3) a save is complete when nothing changed for so long" in error.hint
    del base["settle"], base["remote"][0]["badnwidth"], base["local"]["save_totl_limit"]
    base["save_dri"] = base.pop("save_dir")
    assert refusal(write(tmp_path, base)).hint == 'did you mean "save_dir"?'


@pytest.mark.parametrize("written", ["~/llama", "$HOME/llama", "${HOME}/llama"])
def test_a_path_below_home_is_named_whole(
    tmp_path: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """It is not expanded: the daemon and who asks for its status may have two homes."""
    monkeypatch.setenv("HOME", "/home/you")
    base["save_dir"] = written
    told = refusal(write(tmp_path, base))
    assert "/home/you/llama" in f"{told.message} {told.hint}"


def test_the_corpus_is_large() -> None:
    assert len(MUTANTS) >= 500
    for section, model in SECTIONS:
        prefix = f"{section}." if section else ""
        assert {f"{prefix}{key}" for key in toml_keys(model)} <= set(WRONG), "a key without wrong values"


@pytest.mark.parametrize(("section", "key", "value", "named"), MUTANTS)
def test_mutants_are_refused(
    tmp_path: Path, base: dict[str, Any], section: str, key: str, value: Any, named: str
) -> None:
    tables = {"": base, "layout": base.setdefault("layout", {}), "local": base["local"]}
    target = tables.get(section, base["remote"][0])
    if key == "keep_last" and section == "local":
        target.pop("save_total_limit")
    target[key] = value
    path = write(tmp_path, base)
    error = refusal(path)
    assert str(path) in error.message
    assert key in error.message
    assert named in str(error)
    if (
        named not in ("secret", "credentials", "storage_options")
        and isinstance(value, str | int | float)
        and not str(value).startswith("@")
    ):
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        # the query of a URL may hold a secret
        is_url = "://" in shown
        assert (shown.partition("?")[0] if is_url else shown) in error.message
    if named == "secret":
        assert "hunter2" not in str(error)
