"""examples/kubernetes holds what it says: required fields, names that exist, commands that ckptd has.

No schema is loaded: the fields are those that the recipe depends on (docs/clusters.md).
"""

from __future__ import annotations

from typing import Any

import yaml
from typer.main import get_group

from ckptd.cli.main import build_app
from ckptd.config.environment import settings_from_environment
from ckptd.config.quantities import parse_duration
from tests.support.real import REPOSITORY

PLACE = REPOSITORY / "examples" / "kubernetes"
DOCUMENTS: dict[str, dict[str, Any]] = {
    document["kind"]: document for document in yaml.safe_load_all((PLACE / "training.yaml").read_text())
}
POD: dict[str, Any] = DOCUMENTS["Job"]["spec"]["template"]["spec"]
FIRST: dict[str, Any] = yaml.safe_load((PLACE / "first-start.yaml").read_text())
ONCE = FIRST["spec"]["template"]["spec"]["containers"][0]
RESUME, SIDECAR = POD["initContainers"]
TRAIN = POD["containers"][0]
SETTINGS: dict[str, str] = DOCUMENTS["ConfigMap"]["data"]


def seconds(text: str) -> float:
    found = parse_duration(text)
    assert found is not None
    return found


def test_every_document_says_what_it_is() -> None:
    assert {kind: document["apiVersion"] for kind, document in DOCUMENTS.items()} == {
        "ConfigMap": "v1",
        "PersistentVolumeClaim": "v1",
        "Job": "batch/v1",
    }
    assert all(document["metadata"]["name"] for document in (*DOCUMENTS.values(), FIRST))
    assert (FIRST["apiVersion"], FIRST["kind"], FIRST["spec"]["backoffLimit"]) == ("batch/v1", "Job", 0)
    assert POD["restartPolicy"] == "Never"
    claim = DOCUMENTS["PersistentVolumeClaim"]["spec"]
    assert claim["accessModes"]
    assert claim["resources"]["requests"]["storage"]


def test_every_container_has_what_the_cluster_asks_for() -> None:
    """Pinned images, memory, mounts that exist, and the rights of the strictest policy ("restricted")."""
    volumes = {volume["name"] for volume in POD["volumes"]}
    once = FIRST["spec"]["template"]["spec"]
    assert {name: POD["securityContext"][name] for name in once["securityContext"]} == once["securityContext"]
    assert {mount["name"] for mount in ONCE["volumeMounts"]} == {volume["name"] for volume in once["volumes"]}
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    for container in (RESUME, SIDECAR, TRAIN, ONCE):
        assert container["image"].partition(":")[2] not in ("", "latest")
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    for container in (RESUME, SIDECAR, ONCE):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {
            source["configMapRef"]["name"] for source in container["envFrom"] if "configMapRef" in source
        } == {DOCUMENTS["ConfigMap"]["metadata"]["name"]}
    assert (
        POD["volumes"][0]["persistentVolumeClaim"]["claimName"]
        == (DOCUMENTS["PersistentVolumeClaim"]["metadata"]["name"])
    )


def test_all_containers_run_as_one_user() -> None:
    """No container overrides the pod's user: P19, and the daemon removes what the trainer made."""
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == 10001
    for container in (RESUME, SIDECAR, TRAIN):
        assert "runAsUser" not in container["securityContext"]


def test_the_order_is_resume_then_daemon_then_trainer_and_the_drain_fits() -> None:
    """A native sidecar ends after the trainer, within the pod's grace; its preStop runs while that ends."""
    assert "restartPolicy" not in RESUME
    assert SIDECAR["restartPolicy"] == "Always"
    drain = seconds(SIDECAR["args"][SIDECAR["args"].index("--drain") + 1])
    stop = SIDECAR["lifecycle"]["preStop"]["exec"]["command"]
    before = seconds(stop[stop.index("--deadline") + 1])
    assert max(before + 10, 60) + drain <= POD["terminationGracePeriodSeconds"]


def test_commands_and_settings_are_ckptds() -> None:
    """Verbs, options and variables exist; none is nearly one."""
    verbs = get_group(build_app()).commands
    for command in (
        ["ckptd", *SIDECAR["args"]],
        ["ckptd", *ONCE["args"]],
        SIDECAR["startupProbe"]["exec"]["command"],
        SIDECAR["livenessProbe"]["exec"]["command"],
        SIDECAR["lifecycle"]["preStop"]["exec"]["command"],
        RESUME["args"][0].partition("$(")[2].partition(")")[0].split(),
    ):
        assert command[0] == "ckptd"
        known = {option for parameter in verbs[command[1]].params for option in parameter.opts}
        assert {word for word in command if word.startswith("--")} <= known
    read = settings_from_environment(SETTINGS)
    taken = {*read.job, *read.local, *read.remote, *read.daemon}
    assert len(taken) + len({"CKPTD_SAVE_DIR", "CKPTD_URL"} & SETTINGS.keys()) == len(SETTINGS)
    assert all(isinstance(value, str) for value in SETTINGS.values())
    assert seconds("110s") == 110
