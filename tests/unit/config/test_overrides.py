"""Settings that a person types to ask what they would do (`ckptd plan --with`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptd.config.loader import job_from_arguments, load_job, load_job_file
from ckptd.config.overrides import with_settings
from ckptd.errors import CkptdError, ConfigError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.policy.retention import RetentionKeys


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    """A job file with a limit in each of three places."""
    path = tmp_path / "run.toml"
    remotes = (f'[[remote]]\nname = "{name}"\nurl = "/mnt/{name}"\nkeep_last = 10' for name in ("nas", "far"))
    path.write_text("\n".join(['save_dir = "/nvme/run"', "[local]", "save_total_limit = 3", *remotes]))
    return load_job(path, check_paths=False)


def test_a_setting_is_for_all_places_or_for_the_one_that_is_named(job: JobConfig) -> None:
    def keys(*settings: str) -> RetentionKeys:
        return with_settings(job, settings).retention_keys

    def limits(*settings: str) -> list[int | None]:
        found = keys(*settings)
        policies = [found.local, *(found.remotes[name].retention for name in ("nas", "far"))]
        return [policy.save_total_limit for policy in policies]

    assert limits() == [3, 10, 10]
    assert limits("keep_last=5") == [5, 5, 5]
    assert limits("local.keep_last=5") == [5, 10, 10]
    assert limits("nas.save_total_limit = 7", "far.keep_last=none") == [3, 7, None]
    assert limits("keep_last=5", "keep_last=6", "local.keep_last=7") == [7, 6, 6]
    found = keys("nas.keep_bytes=2TB", 'far.keep_every="6h"', "unuploaded=thin")
    assert found.remotes["nas"].retention.keep_bytes == 2 * 10**12
    assert found.remotes["far"].retention.keep_every_seconds == 6 * 3600
    assert found.unuploaded == "thin"
    ladder = keys('ladder=[{ after = 5, form = "gone" }]').local.ladder
    assert [(rung.form, rung.after_newer) for rung in ladder] == [("gone", 5)]
    # judged once, with all of them: neither is allowed without the other
    together = keys("local.keep_last=none", "local.keep_bytes=1TB", "unuploaded=delete")
    assert (together.local.save_total_limit, together.local.keep_bytes) == (None, 10**12)


def test_a_job_of_a_glob_and_one_of_arguments_take_settings_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    path = tmp_path / "sweep.toml"
    path.write_text(f'save_dir = "{tmp_path}/runs/*"\n[[remote]]\nname = "nas"\nurl = "/mnt/nas/{{dir}}"\n')
    jobs = load_job_file(path, check_paths=False)
    jobs.append(job_from_arguments(str(tmp_path / "runs" / "a"), "/mnt/nas/a", check_paths=False))
    assert [job.remotes[0].url for job in jobs] == ["/mnt/nas/a", "/mnt/nas/b", "/mnt/nas/a"]
    for job in jobs:
        changed = with_settings(job, ["local.keep_last=4"])
        assert changed.local.policy.save_total_limit == 4
        assert (changed.name, changed.save_dir, changed.remotes) == (job.name, job.save_dir, job.remotes)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (["keep_lats=5"], UsageError, "keep_last"),
        (["keep_last"], UsageError, "neither a job file nor a setting"),
        (["s3.keep_last=5"], UsageError, "it has far, local, nas"),
        (["nas.url=/tmp"], UsageError, "no retention key"),
        (["unuploaded=never"], ConfigError, "'keep', 'thin' or 'delete'"),
        (["nas.keep_last=0"], ConfigError, "greater than or equal to 1"),
        (["nas.keep_last=abc"], ConfigError, "a valid integer"),
        (["nas.keep_last=" + "[" * 3000], ConfigError, "a valid integer"),
        (["local.keep_bytes=2"], ConfigError, "a size is a string with a unit"),
        (["keep_best=3"], ConfigError, "keep_best compares a metric"),
        (["local.ladder=[{after=1,form='weights-bf16'}]"], ConfigError, "does not stay on the node"),
        (["nas.ladder=[{after=1,form='weights-bf16'}]"], ConfigError, "never comes to this remote"),
        (["nas.ladder=[{after=1,form='gone'}]", "nas.keep_last=none"], ConfigError, "set save_total_limit"),
        (["unuploaded=thin", "local.keep_last=none"], ConfigError, "deletes nothing while [local] keeps"),
    ],
)
def test_what_a_job_file_may_not_say_is_refused_as_there(
    job: JobConfig, settings: list[str], kind: type[CkptdError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        with_settings(job, settings)
    assert words in f"{caught.value} {caught.value.hint}"
