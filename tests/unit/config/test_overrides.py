"""Settings that a person types to ask what they would do (`ckptd plan --with`)."""

from __future__ import annotations

import pytest

from ckptd.config.overrides import with_settings
from ckptd.config.schema import JobConfig
from ckptd.errors import CkptdError, ConfigError, UsageError

JOB = JobConfig.model_validate(
    {
        "save_dir": "/nvme/run",
        "local": {"save_total_limit": 3},
        "remote": [{"name": name, "url": f"/mnt/{name}", "keep_last": 10} for name in ("nas", "far")],
    }
)


def limits(*settings: str) -> list[int | None]:
    keys = with_settings(JOB, settings).retention_keys
    return [keys.local.save_total_limit, *(keys.remotes[name].save_total_limit for name in ("nas", "far"))]


def test_a_setting_is_for_all_places_or_for_the_one_that_is_named() -> None:
    assert limits() == [3, 10, 10]
    assert limits("keep_last=5") == [5, 5, 5]
    assert limits("local.keep_last=5") == [5, 10, 10]
    assert limits("nas.save_total_limit = 7", "far.keep_last=none") == [3, 7, None]
    keys = with_settings(JOB, ["nas.keep_bytes=2TB", 'far.keep_every="6h"', "unuploaded=thin"]).retention_keys
    assert keys.remotes["nas"].keep_bytes == 2 * 10**12
    assert keys.remotes["far"].keep_every_seconds == 6 * 3600
    assert keys.unuploaded == "thin"
    ladder = with_settings(JOB, ['ladder=[{ after = 5, form = "gone" }]']).retention_keys.local.ladder
    assert [(rung.form, rung.after_newer) for rung in ladder] == [("gone", 5)]


@pytest.mark.parametrize(
    ("setting", "kind", "words"),
    [
        ("keep_lats=5", UsageError, "keep_last"),
        ("keep_last", UsageError, "neither a job file nor a setting"),
        ("s3.keep_last=5", UsageError, "it has far, local, nas"),
        ("nas.url=/tmp", UsageError, "no retention key"),
        ("unuploaded=never", UsageError, "keep | thin | delete"),
        ("keep_last=0", ConfigError, "keep_last"),
        ("keep_bytes=2", ConfigError, "keep_bytes"),
    ],
)
def test_what_is_no_setting_is_named(setting: str, kind: type[CkptdError], words: str) -> None:
    with pytest.raises(kind) as caught:
        with_settings(JOB, [setting])
    assert words in f"{caught.value} {caught.value.hint}"
