"""The wheel: installs into a clean environment without torch, DeepSpeed and numpy, and its command works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 280
MOST_BYTES = 120_000_000
"""Of a base install, by the bytes of its files; pip and setuptools, which the venv brought, are not of it."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("COV_", "COVERAGE", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def installed_bytes(home: Path) -> int:
    """All of site-packages but what any venv has."""
    (packages,) = home.glob("lib/python3*/site-packages")
    ours = (p for p in packages.iterdir() if not p.name.startswith(("pip", "setuptools", "_distutils")))
    return sum(f.lstat().st_size for p in ours for f in (p, *p.rglob("*")) if f.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, ROOT)
    (found,) = out.glob("ckptd-*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith("METADATA"))
        required = [
            line.removeprefix("Requires-Dist: ")
            for line in archive.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist: ") and "extra ==" not in line
        ]
    assert {n.split("/")[0] for n in names} == {"ckptd", names[0].split("/")[0], Path(metadata).parts[0]}
    assert any(n == "ckptd/cli/main.py" for n in names)
    assert not any(r.lower().startswith(("torch", "deepspeed", "numpy", "matplotlib")) for r in required)


@pytest.mark.timeout(600)
def test_a_clean_environment_has_no_torch_and_the_command_works(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    listed = {row["name"].lower() for row in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    assert "ckptd" in listed
    assert installed_bytes(home) <= MOST_BYTES
    assert not listed & {"torch", "deepspeed", "numpy", "matplotlib", "moto"}
    assert "install-service" in run(home / "bin" / "ckptd", "--help", cwd=tmp_path)
    assert run(home / "bin" / "ckptd", "--version", cwd=tmp_path).startswith("ckptd ")
