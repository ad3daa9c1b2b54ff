"""Metrics for Prometheus: what they say, that promtool takes them, rules and dashboard that rest on them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ckptd.daemon.health.exporter import Exporter
from tests.e2e.harness import RUN, node
from tests.support import status_gallery as g
from tests.support.real import prepare

if TYPE_CHECKING:
    from ckptd.observe.status import JobStatus

CONFIG = Path(__file__).resolve().parents[4] / "config"


def written(tmp_path: Path, *jobs: JobStatus, **of_daemon: Any) -> str:
    """The page of a daemon that runs these jobs."""
    path = tmp_path / "ckptd.prom"
    exporter = Exporter(str(path))
    exporter.see(g.daemon(**of_daemon), jobs)
    assert exporter.failed is None
    return path.read_text()


def values(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values …) → value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_asked_first_comes_first_and_says_what_status_says(tmp_path: Path) -> None:
    full = g.job(disk=g.documents()["safe, and the disk fills"].jobs[0].disk)
    waiting = g.behind(
        name="qwen", exposed_seconds=9.0, problems=(g.FULL, g.UNREACHABLE), paused=g.PAUSED, state="paused"
    )
    text = written(tmp_path, full, waiting, g.INVALID)
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert names[:3] == ["ckptd_training_at_risk_seconds", "ckptd_steps_at_risk", "ckptd_exposed_seconds"]
    found = values(text)
    assert found["ckptd_disk_full_in_saves", "llama"] == 3
    assert ("ckptd_disk_full_in_saves", "qwen") not in found
    assert found["ckptd_steps_at_risk", "qwen"] == 500
    assert found["ckptd_committed_step", "llama"] == 4000
    assert found["ckptd_exposed_seconds", "llama"] == 0
    assert found["ckptd_exposed_seconds", "qwen"] == pytest.approx(time.time() - g.NOW + 9, abs=120)
    assert found["ckptd_problems", "qwen", "remote-full", "attention"] == 1
    assert found["ckptd_job_state", "qwen", "paused"] == 1
    assert found["ckptd_job_state", "typo", "invalid"] == 1
    assert found["ckptd_job_state", "llama", "behind"] == 0
    assert (found["ckptd_paused", "qwen"], found["ckptd_paused", "llama"]) == (1, 0)
    assert found["ckptd_upload_left_bytes", "qwen", "s3"] == 4_500_000_000
    assert found["ckptd_uncommitted_checkpoints", "qwen"] == 1
    # what ages is counted to the moment of asking
    aged = time.time() - g.NOW + 560
    assert found["ckptd_training_at_risk_seconds", "llama"] == pytest.approx(aged, abs=120)


def test_of_a_commit_without_a_time_no_time_is_said(tmp_path: Path) -> None:
    safe = g.job().safe
    assert safe is not None
    found = values(written(tmp_path, g.job(safe=replace(safe, committed_at=""))))
    assert ("ckptd_committed_timestamp_seconds", "llama") not in found
    assert found["ckptd_committed_step", "llama"] == safe.step


def test_promtool_finds_nothing_to_say_of_the_page(tmp_path: Path) -> None:
    text = written(tmp_path, g.job(), g.behind(name="qwen", problems=(g.FULL,)))
    done = promtool("check", "metrics", given=text)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def promtool(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    assert found is not None, "promtool is missing (make system-packages)"
    return subprocess.run(
        [found, *words], input=given, capture_output=True, text=True, check=False, timeout=200, cwd=CONFIG
    )


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    done = promtool("check", "rules", "--lint-fatal", "prometheus/ckptd.rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("test", "rules", "prometheus/ckptd.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load((CONFIG / "prometheus" / "ckptd.rules.yml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((CONFIG / "prometheus" / "ckptd.test.yml").read_text())["tests"]
    said = [one for test in tests for one in test["alert_rule_test"]]
    for kept in (lambda one: one["exp_alerts"], lambda one: not one["exp_alerts"]):
        assert {one["alertname"] for one in said if kept(one)} == {rule["alert"] for rule in rules}


def test_rules_dashboard_and_docs_name_no_metric_that_is_not_there(tmp_path: Path) -> None:
    text = written(tmp_path, g.job(), g.behind(name="qwen", problems=(g.FULL,)))
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} | {"ckptd_job"}
    dashboard = (CONFIG / "grafana" / "ckptd.json").read_text()
    queries = [t["expr"] for panel in json.loads(dashboard)["panels"] for t in panel["targets"]]
    operations = (CONFIG.parent / "docs" / "operations.md").read_text()
    for where in (*queries, (CONFIG / "prometheus" / "ckptd.rules.yml").read_text(), operations):
        named = set(re.findall(r"\bckptd_[a-z_]+\b", where))
        assert named - known == set(), where
    rules = [
        {"record": f"of:the:dashboard{number}", "expr": query.replace("$job", ".*")}
        for number, query in enumerate(queries)
    ]
    as_rules = tmp_path / "dashboard.json"
    as_rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(as_rules))
    assert done.returncode == 0, done.stdout + done.stderr
    documented = set(re.findall(r"\bckptd_[a-z_]+\b", operations))
    assert known - documented - {"ckptd_job"} == set(), "docs/operations.md lists every metric"


def test_a_port_that_is_taken_is_said_and_the_daemon_goes_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        exporter = Exporter(f"127.0.0.1:{port}")
        exporter.see(g.daemon(), [g.job()])
        assert f"127.0.0.1:{port}" in (exporter.failed or "")
    exporter.change(str(tmp_path / "ckptd.prom"))
    exporter.see(g.daemon(), [g.job()])
    assert exporter.failed is None
    exporter.change(f"127.0.0.1:{port}")
    exporter.see(g.daemon(), [g.job()])
    try:
        assert "ckptd_steps_at_risk" in read(port)
    finally:
        exporter.close()
    with pytest.raises(OSError, match="refused"):
        read(port)


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=200) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.real
def test_a_daemon_offers_what_it_publishes(tmp_path: Path) -> None:
    """A page while it runs, of the checkpoint that it committed; nothing of it afterwards."""
    prepare([RUN])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ckptd.toml").write_text(f'metrics = "127.0.0.1:{port}"\n')
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.start("--config-dir", str(tmp_path / "etc"))
        here.save(3)
        here.wait_committed("global_step3~g1")
        here.wait("told", lambda: values(read(port)).get(("ckptd_committed_step", "run")) == 3)
        assert promtool("check", "metrics", given=read(port)).returncode == 0
        assert here.stop() == 0
        with pytest.raises(OSError, match="refused"):
            read(port)
