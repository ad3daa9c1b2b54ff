"""Configuration: what is right loads; relations, environment, digest, several jobs in one daemon."""

from __future__ import annotations

import json
import os
import shlex
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ckptd.config.commands import command_for, default_config_dir
from ckptd.config.environment import settings_from_environment, shown_variables
from ckptd.config.loader import (
    job_from_arguments,
    load_all,
    load_daemon,
    load_job,
    load_job_file,
    load_jobs,
    resolve_job,
)
from ckptd.config.messages import toml_keys
from ckptd.config.s3 import S3Keys
from ckptd.config.schema import (
    DaemonConfig,
    JobConfig,
    LayoutConfig,
    LocalConfig,
    RemoteConfig,
    _say_renamed,
    config_digest,
)
from ckptd.config.templates import job_template
from ckptd.errors import CkptdError, ConfigError, NotFoundError
from ckptd.storage.stores.access import Access, access_of
from tests.support.config_files import base, refusal, write

__all__ = ["base"]

EXAMPLES = Path(__file__).parents[3] / "config"


def test_a_full_job(tmp_path: Path, base: dict[str, Any]) -> None:
    job = load_job(write(tmp_path, base))
    assert job.name == "llama"
    assert job.settle_seconds == 5.0
    assert job.local.policy.save_total_limit == 3
    assert job.local.min_free.of(1000) == 50
    assert job.remotes[0].bandwidth.at(0) == 10**9
    assert job.remotes[0].bandwidth.shown(0) == "1 GB/s = 8 Gb/s"
    assert job.deletes_locally
    assert job.file == tmp_path / "llama.toml"
    assert not job.opt_outs


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_opting_out_of_the_first_promise_is_said_for_ever(
    tmp_path: Path, base: dict[str, Any], how: str
) -> None:
    """And refused where it would mean nothing."""
    base["unuploaded"] = how
    job = load_job(write(tmp_path, base))
    assert [text.partition(":")[0] for text in job.opt_outs] == [f'unuploaded = "{how}"']
    del base["local"]["save_total_limit"]
    assert f'unuploaded = "{how}" deletes nothing' in refusal(write(tmp_path, base)).message


ONE = 'save_dir = "/tmp/x"\n[[remote]]\nname = "nas"\nurl = "/n"\n'
GLOBS = EXAMPLES / "sweep.toml"


def test_the_example_with_a_glob_makes_a_job_of_each_match(tmp_path: Path) -> None:
    for run in ("lr1", "lr2"):
        (tmp_path / "nvme" / "sweeps" / run / "ckpt").mkdir(parents=True)
    path = tmp_path / GLOBS.name
    path.write_text(GLOBS.read_text().replace('"/', f'"{tmp_path}/'))
    jobs = load_job_file(path)
    assert [job.remotes[0].url for job in jobs] == [
        f"{tmp_path}/mnt/nas/sweeps/{run}" for run in ("lr1", "lr2")
    ]


@pytest.mark.parametrize("path", sorted({*EXAMPLES.glob("*.toml")} - {GLOBS}), ids=lambda p: p.name)
def test_examples_load(path: Path) -> None:
    text = tomllib.loads(path.read_text())
    kind = DaemonConfig if "save_dir" not in text else JobConfig
    kind.model_validate(text)


@pytest.mark.parametrize("name", ["o'brien", 'a"b', "ünïcode", "sp ace", "back\\slash"])
def test_init_prints_every_key_and_loads(tmp_path: Path, name: str) -> None:
    (tmp_path / "nas").mkdir()
    text = job_template(str(tmp_path / name), str(tmp_path / "nas" / name), "job")
    path = tmp_path / "job.toml"
    path.write_text(text)
    job = load_job(path)
    assert job.save_dir == tmp_path / name
    on_s3 = job_template(str(tmp_path / name), "s3://bucket/run", "job")
    for section in (JobConfig, LayoutConfig, LocalConfig, RemoteConfig):
        for key in toml_keys(section):
            assert f"{key} = " in text + on_s3 or f"[{key}]" in text, key
    path.write_text(on_s3)
    assert load_job(path).remotes[0].url == "s3://bucket/run"
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 132


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("url", "s3://key:hunter2@bucket/x"),
        ("endpoint_url", "http://key:hunter2@host"),
        ("credentials", "AKIAhunter2:hunter2"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(tmp_path: Path, key: str, value: str) -> None:
    remote = {"name": "s3", "url": "s3://bucket/x"} | {key: value}
    lines = [f"{k} = {json.dumps(v)}" for k, v in remote.items()]
    path = tmp_path / "job.toml"
    path.write_text("\n".join([f'save_dir = "{tmp_path}/run"', "[[remote]]", *lines]))
    with pytest.raises(ConfigError, match="secret") as caught:
        load_job(path)
    assert "hunter2" not in str(caught.value)


def test_how_much_is_read_again_a_day(tmp_path: Path) -> None:
    """`scrub` is off by default; an amount a day, in bytes."""
    path = tmp_path / "job.toml"
    for line, wanted in (("", None), ('scrub = "off"', None), ('scrub = "50GB/day"', 50 * 10**9)):
        path.write_text(f'save_dir = "{tmp_path}/run"\n[[remote]]\nname = "nas"\nurl = "/mnt/nas/x"\n{line}')
        assert load_job(path).remotes[0].scrub_bytes_per_day == wanted


@pytest.mark.parametrize("key", ["endpoint_url", "region", "credentials", "part_size"])
def test_keys_of_s3_are_refused_for_directories(tmp_path: Path, key: str) -> None:
    value = {"endpoint_url": "http://host", "part_size": "64MiB"}.get(key, "env")
    path = tmp_path / "job.toml"
    text = f'save_dir = "{tmp_path}/run"\n[[remote]]\nname = "nas"\nurl = "/mnt/nas/x"\n{key} = "{value}"'
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{key} is for s"):
        load_job(path)


def test_init_shows_the_defaults(tmp_path: Path) -> None:
    """A template with every commented default switched on means what the bare file means."""
    (tmp_path / "nas").mkdir()
    text = job_template(str(tmp_path / "run"), str(tmp_path / "nas" / "run"), "job")
    keep_out: tuple[str, ...]
    keep_out = ("save_total_limit", "keep_", "ephemeral", "ladder", "metric", "extra", "node_name")
    keep_out = (*keep_out, "files", "complete_when", "ready_dir")
    shown = [
        line.removeprefix("# ")
        if " = " in line and not line.startswith(tuple(f"# {k}" for k in keep_out))
        else line
        for line in text.splitlines()[3:]
    ]
    bare, full = tmp_path / "a.toml", tmp_path / "b.toml"
    bare.write_text(text)
    full.write_text("\n".join(shown))
    assert load_job(bare).model_dump() == load_job(full).model_dump()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("save_dir = /x\n", "no TOML"),
        ('save_dir = "/x\n', "no TOML"),
        ("", "save_dir is missing"),
        ("[local]\n[local]\n", "no TOML"),
        (
            'save_dir = "/tmp/x"\n[remote]\nname = "nas"\nurl = "/n"\n',
            "remote: there may be several; write [[r",
        ),
        ('save_dir = "/tmp/x"\nremote = ["/n"]\n', "it is a table; write [[remote]] and"),
        (f"{ONE}forms = 'zero'\n", 'remote[0].forms = "zero": it is a list; write it in [ ]'),
        (
            f"{ONE}[remote.ladder]\nafter = 5\n",
            "remote[0].ladder: there may be several; write [[remote.ladder]]",
        ),
        (f"{ONE}[local]\nladder = 'x'\n", 'local.ladder = "x": it is a list; write it in [ ]'),
        ('save_dir = "/tmp/x"\n', "no [[remote]]"),
        ('save_dir = "/tmp/x"\n[[remote]]\nurl = "/n"\n', "remote[0].name is missing"),
        ('save_dir = "/tmp/x"\n[[remote]]\nname = "nas"\n', "remote[0].url is missing"),
    ],
)
def test_whole_file_problems(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    assert part in refusal(path).message


def test_what_a_table_holds_is_not_shown(tmp_path: Path) -> None:
    """A webhook under a header with brackets of another kind is a secret all the same."""
    (tmp_path / "ckptd.toml").write_text('[[notify]]\nwebhook = "https://hooks.example/hunter2"\n')
    with pytest.raises(ConfigError, match=r"notify: it is a table; write \[notify\]") as caught:
        load_daemon(tmp_path / "ckptd.toml", {})
    assert "hunter2" not in str(caught.value)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b'name = "\xff\xfe"')
    assert "UTF-8" in refusal(path).message


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load_job(tmp_path / "none.toml")


def test_secret_in_a_url_is_not_repeated(tmp_path: Path, base: dict[str, Any]) -> None:
    base["remote"][0]["url"] = "sftp://me:hunter2@host/x"
    error = refusal(write(tmp_path, base))
    assert "secret" in error.message
    assert "hunter2" not in str(error)


def test_relations_of_one_job(tmp_path: Path, base: dict[str, Any]) -> None:
    remote = base["remote"][0]
    for url, part in (
        (base["save_dir"], "is also save_dir"),
        (base["save_dir"] + "/nas", "lies inside save_dir"),
        (str(tmp_path / "nvme"), "save_dir lies inside remote[0].url"),
    ):
        remote["url"] = url
        assert part in refusal(write(tmp_path, base)).message
    remote["url"] = str(tmp_path / "nas" / "x")
    base["remote"].append({"name": "nas", "url": str(tmp_path / "other"), "required": False})
    assert 'name = "nas"' in refusal(write(tmp_path, base)).message
    base["remote"][1] = {"name": "two", "url": remote["url"], "required": False}
    assert "url" in refusal(write(tmp_path, base)).message


def test_deleting_needs_a_required_remote(tmp_path: Path, base: dict[str, Any]) -> None:
    base["remote"][0]["required"] = False
    assert "no remote is required" in refusal(write(tmp_path, base)).message
    del base["local"]["save_total_limit"]
    load_job(write(tmp_path, base))


def test_save_dir_must_be_real(tmp_path: Path, base: dict[str, Any]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    base["save_dir"] = str(tmp_path / "link")
    error = refusal(write(tmp_path, base))
    assert str(tmp_path / "real") in error.hint
    base["save_dir"] = str(tmp_path / "nowhere" / "run")
    assert "parent" in refusal(write(tmp_path, base)).message
    (tmp_path / "file").write_text("")
    base["save_dir"] = str(tmp_path / "file")
    assert "not a directory" in refusal(write(tmp_path, base)).message


def test_load_all_runs_the_good_ones(tmp_path: Path, base: dict[str, Any]) -> None:
    jobs = tmp_path / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    write(jobs, base, "a.toml")
    second = json.loads(json.dumps(base))
    second["save_dir"] += "2"
    write(jobs, second, "b.toml")  # the same URL as a (H6)
    second["remote"][0]["url"] += "2"
    write(jobs, second | {"name": "a"}, "c.toml")
    write(jobs, second | {"setle": "5s"}, "d.toml")
    second["remote"][0]["url"] += "/inside"
    write(jobs, second, "e.toml")
    (jobs / ".f.toml.swp").write_text("garbage")
    loaded = load_all(tmp_path / "conf")
    assert [job.name for job in loaded.jobs] == ["a", "e"]
    words = {path.name: str(error) for path, error in loaded.problems}
    assert set(words) == {"b.toml", "c.toml", "d.toml"}
    assert "url" in words["b.toml"]
    assert "is taken by" in words["c.toml"]
    assert '"settle"' in words["d.toml"]


def test_state_dir_inside_a_save_dir(tmp_path: Path, base: dict[str, Any]) -> None:
    jobs = tmp_path / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    write(jobs, base, "a.toml")
    (tmp_path / "conf" / "ckptd.toml").write_text(f'state_dir = "{base["save_dir"]}/state"\n')
    loaded = load_all(tmp_path / "conf")
    assert not loaded.jobs
    assert "state_dir" in loaded.problems[0][1].message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('memory_budget = "100MiB"', "256MiB"),
        ("memory_budget = 5", "memory_budget"),
        ('memory_budget = "0%"', "memory_budget"),
        ('memory = "1GiB"', '"memory_budget"'),
        ('bandwidth = "8"', "bandwidth"),
        ('state_dir = "state"', "absolute"),
        ('save_dir = "/x"', "a job file"),
        ('notify = "mail"', "write [notify]"),
        ('[notify]\nbandwidth = "1GB/s"', "ckptd.toml"),
        ("max_uploads = 0", "max_uploads"),
        ('metrics = "9310"', "HOST:PORT"),
        ('metrics = "localhost:0"', "HOST:PORT"),
        ('metrics = "/var/lib/node_exporter/ckptd"', ".prom"),
    ],
)
def test_daemon_file(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "ckptd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_daemon(path, {})
    assert part in str(caught.value)


@pytest.mark.parametrize("place", ["127.0.0.1:9310", "[::1]:9310", "/var/lib/node_exporter/ckptd.prom"])
def test_places_of_metrics(tmp_path: Path, place: str) -> None:
    path = tmp_path / "ckptd.toml"
    path.write_text(f'metrics = "{place}"\n')
    assert load_daemon(path, {}).metrics == place


def test_daemon_defaults_and_environment(tmp_path: Path) -> None:
    assert load_daemon(tmp_path / "none.toml", {}).memory_budget_bytes(1 << 40) == 1 << 30
    daemon = load_daemon(None, {"CKPTD_MEMORY_BUDGET": "2%", "CKPTD_STATE_DIR": "/var/lib/x"})
    assert daemon.memory_budget_bytes(1 << 40) == (1 << 40) // 50
    assert daemon.memory_budget_bytes(1 << 30) == 256 << 20
    assert daemon.state_dir == Path("/var/lib/x")


def test_arguments_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nas").mkdir()
    job = job_from_arguments(
        "out/",
        "nas/x",
        environ={
            "CKPTD_SETTLE": "1s",
            "CKPTD_SAVE_TOTAL_LIMIT": "2",
            "CKPTD_REMOTE_BANDWIDTH": "10MB/s",
            "CKPTD_REMOTE_SAME_FILESYSTEM": "true",
            "CKPTD_REMOTE_FORMS": "zero",
            "CKPTD_EXTRA": "tokenizer*, config.json",
            "CKPTD_DEBUG": "1",
            "CKPTD_SERVICE_HOST": "10.0.0.1",
            "CKPTD_PORT": "tcp://10.0.0.1:80",
            "PATH": "/bin",
        },
    )
    assert job.save_dir == tmp_path / "out"
    assert job.name == "out"
    assert job.remotes[0].url == str(tmp_path / "nas" / "x")
    assert job.settle_seconds == 1.0
    assert job.local.save_total_limit == 2
    assert job.remotes[0].bandwidth.at(0) == 10**7
    assert job.remotes[0].same_filesystem
    assert job.remotes[0].forms == ("zero",)
    assert job.extra == ("tokenizer*", "config.json")


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("CKPTD_SETTEL", "5s", "CKPTD_SETTLE"),
        ("CKPTD_SAVE_TOTAL_LIMT", "3", "CKPTD_SAVE_TOTAL_LIMIT"),
        ("CKPTD_RUN_ID_ENV", "2", "not in this version"),
        ("CKPTD_SETTLE", "5", "CKPTD_SETTLE"),
        ("CKPTD_SAVE_TOTAL_LIMIT", "many", "CKPTD_SAVE_TOTAL_LIMIT"),
        ("CKPTD_REMOTE_REQUIRED", "perhaps", "CKPTD_REMOTE_REQUIRED"),
    ],
)
def test_wrong_variables(tmp_path: Path, name: str, value: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_from_arguments(str(tmp_path / "o"), str(tmp_path / "n"), environ={name: value})
    assert part in str(caught.value)


def test_digest_is_of_what_all_nodes_share(tmp_path: Path, base: dict[str, Any]) -> None:
    def digest(**changes: Any) -> str:
        return config_digest(load_job(write(tmp_path, base | changes)))

    first = digest()
    assert len(first) == 64
    assert digest(settle="9s", node_name="n1") == first
    assert digest(local={"keep_last": 3, "min_free": "9%"}) == first
    assert digest(local={"save_total_limit": 4}) != first
    assert digest(save_spread="90s") != first
    assert digest(remote=[base["remote"][0] | {"url": str(tmp_path / "nas" / "elsewhere")}]) == first
    assert digest(remote=[base["remote"][0] | {"keep_last": 9}]) != first


def test_a_digest_is_the_one_of_earlier_versions() -> None:
    """Nodes of two versions that are configured alike agree, also where a file has the key that is gone."""
    job = {"save_dir": "/nvme/a", "name": "a", "remote": [{"name": "nas", "url": "/mnt/nas"}]}
    for written in (job, job | {"incomplete_after": "never"}):
        assert (
            config_digest(JobConfig.model_validate(written))
            == "ff9dfc8900827ed399a5b1d47193fbe84798038a9e864f858a1dc7331dcb8510"
        )


def test_a_key_that_is_gone_may_stand_in_the_environment() -> None:
    def made(value: str) -> JobConfig:
        environ = {"CKPTD_INCOMPLETE_AFTER": value}
        return job_from_arguments("/nvme/a", "/mnt/nas", environ=environ, check_paths=False)

    assert made("never").name == "a"
    with pytest.raises(ConfigError, match="not in this version"):
        made("2d")


def test_resolve_job(tmp_path: Path, base: dict[str, Any]) -> None:
    jobs = tmp_path / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    write(jobs, base, "llama.toml")
    (jobs / "bad.toml").write_text("x = 1")
    environ = {"CKPTD_CONFIG_DIR": str(tmp_path / "conf")}
    assert default_config_dir(environ) == tmp_path / "conf"
    assert resolve_job("llama", environ).name == "llama"
    assert resolve_job(base["save_dir"], environ).name == "llama"
    assert resolve_job(str(jobs / "llama.toml"), environ).name == "llama"
    bare = resolve_job(str(tmp_path / "other"), environ)
    assert bare.save_dir == tmp_path / "other"
    assert not bare.remotes
    with pytest.raises(ConfigError):
        resolve_job("bad", environ)
    with pytest.raises(NotFoundError) as caught:
        resolve_job("llamma", environ)
    assert "llama" in caught.value.message


ROLE = "arn:aws:iam::123456789012:role/teams/ckptd"
S3_KEYS = """
addressing = "virtual"
role_arn = "arn:aws:iam::123456789012:role/teams/ckptd"
external_id = "training/7"
sts_endpoint_url = "https://sts.eu-central-1.amazonaws.com"
sse = "aws:kms"
sse_kms_key_id = "arn:aws:kms:eu-central-1:123456789012:key/mrk-1234abcd12ab34cd56ef1234567890ab"
storage_class = "INTELLIGENT_TIERING"
sign_payload = true
"""


def on_s3(tmp_path: Path, keys: str, url: str = "s3://bucket/run") -> Path:
    """A job file with these keys in its remote."""
    path = tmp_path / "job.toml"
    path.write_text(f'save_dir = "{tmp_path}/run"\n[[remote]]\nname = "s3"\nurl = "{url}"\n{keys}\n')
    return path


def test_keys_of_s3_reach_the_store_that_they_are_for(tmp_path: Path) -> None:
    """As they were written, and through the JSON that a child is told them in."""
    remote = load_job(on_s3(tmp_path, f'{S3_KEYS}tags = {{ team = "nlp", run = "llama 7b" }}')).remotes[0]
    access = Access.model_validate_json(access_of(remote).model_dump_json())
    assert access == access_of(remote)
    assert access.for_documents == {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": remote.sse_kms_key_id,
        "Tagging": "run=llama+7b&team=nlp",
    }
    assert access.for_data == access.for_documents | {"StorageClass": "INTELLIGENT_TIERING"}
    shown = dict(access.shown())
    assert shown["role_arn"] == remote.role_arn
    assert shown["tags"] == "run=llama 7b, team=nlp"
    assert access_of(load_job(on_s3(tmp_path, "")).remotes[0]).for_data == {}


def test_tags_are_a_table_a_list_or_a_variable(tmp_path: Path) -> None:
    wanted = (("run", "a=b"), ("team", "nlp"))
    for keys in ('tags = { team = "nlp", run = "a=b" }', 'tags = ["team=nlp", "run=a=b"]'):
        assert load_job(on_s3(tmp_path, keys)).remotes[0].tags == wanted
    environ = {"CKPTD_REMOTE_TAGS": "team=nlp, run=a=b", "CKPTD_REMOTE_SIGN_PAYLOAD": "true"}
    remote = job_from_arguments(str(tmp_path / "run"), "s3://bucket/run", environ=environ).remotes[0]
    assert (remote.tags, remote.sign_payload) == (wanted, True)


def test_options_of_s3fs_are_a_table_a_list_or_a_variable(tmp_path: Path) -> None:
    """Anything that TOML can say reaches s3fs as it was written; the two clients are told apart."""
    table = '{ anon = true, client_kwargs = { region_name = "eu-1" } }'
    remote = load_job(on_s3(tmp_path, f'client = "s3fs"\nstorage_options = {table}')).remotes[0]
    access = Access.model_validate_json(access_of(remote).model_dump_json())
    assert access.storage_options == (("anon", "true"), ("client_kwargs", '{"region_name": "eu-1"}'))
    assert dict(access.shown())["client"] == "s3fs"
    environ = {
        "CKPTD_REMOTE_CLIENT": "s3fs",
        "CKPTD_REMOTE_STORAGE_OPTIONS": "requester_pays=true, profile=team",
    }
    remote = job_from_arguments(str(tmp_path / "run"), "s3://bucket/run", environ=environ).remotes[0]
    assert remote.client == "s3fs"
    assert remote.storage_options == (("profile", '"team"'), ("requester_pays", "true"))
    assert shown_variables(environ) == {"CKPTD_REMOTE_CLIENT": "s3fs"}
    assert load_job(on_s3(tmp_path, "")).remotes[0].client == "botocore"


@pytest.mark.parametrize(
    "options",
    [
        '{ key = "hunter2" }',
        '{ secret = "hunter2" }',
        '{ client_kwargs = { aws_session_token = "hunter2" } }',
        '["token=hunter2"]',
        '["when=hunter2", "asynchronous=true"]',
    ],
)
def test_a_secret_among_options_of_s3fs_is_refused_and_not_repeated(tmp_path: Path, options: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(on_s3(tmp_path, f'client = "s3fs"\nstorage_options = {options}'))
    assert "hunter2" not in f"{caught.value.message}{caught.value.hint}"


@pytest.mark.parametrize(
    ("keys", "url", "words"),
    [
        ("storage_options = { anon = true }", "", 'set client = "s3fs"'),
        (f'client = "s3fs"\nrole_arn = "{ROLE}"', "", "a profile names the role"),
        (
            'client = "s3fs"\nendpoint_url = "http://h"\nstorage_options = { endpoint_url = "http://h" }',
            "",
            "leave one out",
        ),
        ('client = "s3fs"', "/mnt/nas/x", "client is for s3:// remotes"),
        ('external_id = "x1"', "", "external_id is for a role; set role_arn"),
        ('sts_endpoint_url = "https://sts.example.org"', "", "sts_endpoint_url is for a role"),
        ('sse_kms_key_id = "alias/x"', "", 'sse_kms_key_id needs sse = "aws:kms"'),
        ('sse = "AES256"\nsse_kms_key_id = "alias/x"', "", 'sse_kms_key_id needs sse = "aws:kms"'),
        ('addressing = "virtual"\nendpoint_url = "http://10.0.0.1:9000"', "", "is an IP address"),
        ('addressing = "virtual"', "s3://dotted.bucket/x", "no TLS certificate covers"),
        ('storage_class = "STANDARD_AI"', "", 'did you mean "STANDARD_IA"?'),
        ('storage_class = "GLACIER"', "", "cannot be read at once"),
        ('tags = ["a=1", "a=2"]', "", "each key once"),
        (f"tags = {json.dumps([f'k{n}=v' for n in range(11)])}", "", "at most 10 tags"),
        ('verify = "none"', "", "set required = false"),
    ],
)
def test_keys_of_s3_that_do_not_fit_each_other(tmp_path: Path, keys: str, url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(on_s3(tmp_path, keys, url or "s3://bucket/run"))
    assert words in caught.value.message


def test_a_rule_of_a_whole_remote_names_it_and_shows_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(on_s3(tmp_path, 'verify = "none"'))
    assert 'remote[0] ("s3"): verify' in caught.value.message
    assert "{" not in caught.value.message


def test_hosts_over_one_directory_need_a_remote_to_meet_in(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    job = f'save_dir = "{tmp_path}/run"\nshared_fs = true\n'
    path.write_text(job)
    with pytest.raises(ConfigError, match="the hosts agree in a remote; set required = true"):
        load_job(path)
    path.write_text(f'{job}[[remote]]\nname = "hub"\nurl = "hf://datasets/a/b"\n')
    with pytest.raises(ConfigError, match="keeps every heartbeat for ever"):
        load_job(path)
    path.write_text(f'{job}[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas"\n')
    assert load_job(path).shared_takeover_seconds == 180.0


@pytest.mark.parametrize("key", sorted(S3Keys.model_fields))
@pytest.mark.parametrize("secret", ["AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"])
def test_a_key_of_aws_under_any_other_name_is_never_shown(tmp_path: Path, key: str, secret: str) -> None:
    value = f'["team={secret}"]' if key == "tags" else f'"{secret}"'
    with_it = {"external_id": f'role_arn = "arn:aws:iam::1:role/x"\n{key} = {value}'}
    with pytest.raises(ConfigError) as caught:
        load_job(on_s3(tmp_path, with_it.get(key, f"{key} = {value}")))
    assert key in caught.value.message
    assert secret not in str(caught.value)


@pytest.mark.parametrize("key", ["sse_customer_key", "mfa_serial", "aws_session_token"])
def test_keys_that_would_hold_secrets_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="secret") as caught:
        load_job(on_s3(tmp_path, f'{key} = "hunter2"'))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("way", ["own", "other", "file", "arguments", "glob", "glob file"])
def test_what_status_tells_to_type_finds_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """However the daemon was started, from any directory, with a blank in the path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CKPTD_CONFIG_DIR", str(tmp_path / "of the daemon"))
    save_dir, url = tmp_path / "my nvme" / "llama", str(tmp_path / "my nas" / "llama")
    save_dir.mkdir(parents=True)
    is_glob = way.startswith("glob")
    text = (
        f'save_dir = "{save_dir.parent / "*" if is_glob else save_dir}"\nname = "of-mine"\n'
        f'[[remote]]\nname = "nas"\nurl = "{url.replace("llama", "{dir}") if is_glob else url}"\n'
    )
    folder = {"own": "home/ckptd/jobs.d", "other": "of the daemon/jobs.d", "glob": "of the daemon/jobs.d"}
    path = tmp_path / folder.get(way, "else where") / "llama.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    if way == "arguments":
        job = job_from_arguments(str(save_dir), url)
    else:
        (job,) = load_job_file(path)
    words = shlex.split(command_for(job, "accept", "a tag", "--to", "DIR"))
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    if "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    config_dir = Path(words[words.index("--config-dir") + 1]) if "--config-dir" in words else None
    assert (words[:2], words[-3:]) == (["ckptd", "accept"], ["a tag", "--to", "DIR"])
    monkeypatch.chdir("/")
    found = resolve_job(words[2], environ, config_dir=config_dir)
    assert (found.save_dir, found.remotes[0].url) == (save_dir, url)


def test_a_file_that_cannot_be_read_stops_its_own_job_alone(tmp_path: Path, base: dict[str, Any]) -> None:
    """P16: a folder, a link that leads nowhere, somebody else's file."""
    jobs = tmp_path / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    write(tmp_path, base).rename(jobs / "llama.toml")
    (jobs / "folder.toml").mkdir()
    (jobs / "loop.toml").symlink_to("loop.toml")
    loaded = load_all(tmp_path / "conf")
    assert [job.name for job in loaded.jobs] == ["llama"]
    assert {path.name for path, _ in loaded.problems} == {"folder.toml", "loop.toml"}
    assert "is a directory, no job file" in str(dict(loaded.problems)[jobs / "folder.toml"])
    assert resolve_job("llama", {}, config_dir=tmp_path / "conf").name == "llama"
    with pytest.raises(ConfigError, match="symbolic links"):
        resolve_job("loop", {}, config_dir=tmp_path / "conf")


@pytest.mark.timeout(60)
def test_each_job_file_is_read_once(tmp_path: Path) -> None:
    """A second reading may find another file, or none: a pipe gives its content to one reader alone."""
    path = tmp_path / "runs.toml"
    (tmp_path / "nvme" / "a").mkdir(parents=True)
    text = (
        f'save_dir = "{tmp_path}/nvme/*"\n'
        f'[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas/{{dir}}"\nsame_filesystem = true\n'
    )
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(text,), daemon=True)
    writer.start()
    loaded = load_jobs([path], DaemonConfig(state_dir=tmp_path / "state"), {})
    writer.join()
    assert [job.name for job in loaded.jobs] == ["runs-a"]
    assert loaded.glob_roots == (f"{tmp_path}/nvme",)
    (tmp_path / "nvme" / "b").mkdir()
    path.unlink()
    assert [job.name for job in loaded.expanded_again({}).jobs] == ["runs-a", "runs-b"]


def test_a_jobs_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    """Nothing tells which jobs there are: a reload must not end them all."""
    (tmp_path / "jobs.d").write_text("")
    with pytest.raises(CkptdError, match=r"listing .*jobs\.d"):
        load_all(tmp_path)


def test_backfill_is_taken_as_existing_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    """Job files and CKPTD_BACKFILL of 0.1."""
    _say_renamed.cache_clear()
    made = JobConfig.model_validate({"save_dir": "/nvme/run", "name": "run", "backfill": "all"})
    assert made.existing == "all"
    assert 'the key "backfill" is called "existing" now' in caplog.text
    assert settings_from_environment({"CKPTD_BACKFILL": "none"}).job == {"backfill": "none"}
    with pytest.raises(ValidationError):
        JobConfig.model_validate({"save_dir": "/nvme/run", "backfill": "all", "existing": "all"})
