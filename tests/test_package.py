"""The wheel: installs into a clean environment without torch, DeepSpeed and numpy, and its command works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from bench.release import write_checksums, write_sbom
from tests.support.recover_scene import Scene

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 280
SUPPORTED = (11, 12, 13)
"""Minor versions of Python 3."""
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
    run(sys.executable, "-m", "ckptd.cli.man", ROOT / ".build" / "man" / "ckptd.1")  # as `make dist`
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
    data = metadata.split(".dist-info")[0] + ".data"
    assert {n.split("/")[0] for n in names} == {"ckptd", data, Path(metadata).parts[0]}
    assert [n for n in names if n.startswith(data)] == [f"{data}/data/share/man/man1/ckptd.1"]
    assert any(n == "ckptd/cli/main.py" for n in names)
    assert not any(r.lower().startswith(("torch", "deepspeed", "numpy", "matplotlib")) for r in required)


def pythons() -> dict[str, Path]:
    """Version → interpreter, of those that this machine has among the supported ones; always our own."""
    ours = f"3.{sys.version_info.minor}"
    found = {ours: Path(sys.executable)}
    for minor in SUPPORTED:
        version = f"3.{minor}"
        # of pyenv's own commands on PATH those alone work that its user has chosen
        by_pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
        on_path = shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin")
        if version not in found and (at := on_path or next(iter(by_pyenv), None)):
            found[version] = Path(at)
    return found


PYTHONS = pythons()


def examples_are_found(python: Path, ckptd: Path) -> None:
    """Job files, alert rules, dashboard and units are in the package, byte for byte those of the tree."""
    named = [line.split()[0] for line in run(ckptd, "init", "--list").splitlines()]
    asked = "import json; from ckptd.config.templates import EXAMPLES, example_text as text; "
    found = json.loads(run(python, "-c", asked + "print(json.dumps({n: text(n) for n in EXAMPLES}))"))
    assert list(found) == named
    tree = [
        p.read_text() for folder in ("config", "systemd") for p in (ROOT / folder).rglob("*") if p.is_file()
    ]
    assert sorted(found.values()) == sorted(tree)
    assert run(ckptd, "init", "--example", "grafana") == (ROOT / "config/grafana/ckptd.json").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", PYTHONS)
def test_a_clean_environment_has_no_torch_and_the_commands_work(
    wheel: Path, tmp_path: Path, version: str
) -> None:
    """From `pip install` to a restored checkpoint, with each Python that is here."""
    home, is_ours = tmp_path / "venv", PYTHONS[version] == Path(sys.executable)
    run(PYTHONS[version], "-m", "venv", home)
    python, ckptd = home / "bin" / "python", home / "bin" / "ckptd"
    pinned = ("-c", ROOT / "constraints.txt") if is_ours else ()
    run(python, "-m", "pip", "install", "-q", *pinned, wheel)
    listed = {row["name"].lower() for row in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    assert "ckptd" in listed
    assert installed_bytes(home) <= MOST_BYTES
    assert not listed & {"torch", "deepspeed", "numpy", "matplotlib", "moto"}
    assert "restore" in run(ckptd, "--help", cwd=tmp_path)
    assert run(ckptd, "--version", cwd=tmp_path).startswith("ckptd ")
    examples_are_found(python, ckptd)
    scene = Scene(tmp_path)
    tag = scene.save(10)
    run(ckptd, "run", scene.save_dir, scene.nas, "--same-filesystem", "--once", cwd=tmp_path)
    assert json.loads(run(ckptd, "list", scene.nas, "--json"))["remotes"][0]["checkpoints"][0]["tag"] == tag
    run(ckptd, "verify", scene.nas, "--read-data")
    run(ckptd, "restore", scene.nas, "--to", tmp_path / "there")
    for path in (scene.save_dir / tag).iterdir():
        assert (tmp_path / "there" / tag / path.name).read_bytes() == path.read_bytes()
    run(ckptd, "convert", scene.save_dir / tag, tmp_path / "universal")
    assert (tmp_path / "universal" / "zero").is_dir()
    seen = "import fsspec; print(fsspec.filesystem('ckptd', url='nas/run').ls('', detail=False))"
    assert tag in run(python, "-c", seen.replace("nas/run", str(scene.nas)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("installer", ["uv", "pipx"])
def test_it_installs_as_a_tool(wheel: Path, tmp_path: Path, installer: str) -> None:
    """By `uv tool install` and by `pipx install`, and its command keeps a checkpoint."""
    ours, pins, there = Path(sys.executable), ROOT / "constraints.txt", tmp_path / "bin"
    # by pip, which knows the index and the certificates of this machine; uv has settings of its own
    house = tmp_path / "wheels"
    run(ours, "-m", "pip", "wheel", "-q", "-c", pins, "-w", house, wheel)
    if installer == "uv":
        places = (
            "UV_TOOL_DIR=tools",
            f"UV_TOOL_BIN_DIR={there}",
            "UV_PYTHON_DOWNLOADS=never",
            "UV_CACHE_DIR=cache",
        )
        command: tuple[str | Path, ...] = (
            *("tool", "install", "-q", "-c", pins, "--no-index", "--find-links", house),
            *("--python", ours, wheel),
        )
    else:
        places = (f"PIPX_HOME={tmp_path / 'tools'}", f"PIPX_BIN_DIR={there}", "USE_EMOJI=0", "COLUMNS=80")
        command = (
            "install",
            "--python",
            ours,
            f"--pip-args=--no-index --find-links={house} -c {pins}",
            wheel,
        )
    run("env", *places, ours.with_name(installer), *command, cwd=tmp_path)
    assert run(there / "ckptd", "--version").startswith("ckptd ")
    assert "grafana" in run(there / "ckptd", "init", "--list")
    scene = Scene(tmp_path)
    tag = scene.save(10)
    run(there / "ckptd", "run", scene.save_dir, scene.nas, "--same-filesystem", "--once", cwd=tmp_path)
    assert tag in run(there / "ckptd", "list", scene.nas)
    if installer == "uv":
        released(tmp_path / "tools" / "ckptd" / "bin" / "python", tmp_path / "dist")


def released(python: Path, dist: Path) -> None:
    """What `make release` adds: an SBOM with every package that the wheel asks for, and checksums."""
    dist.mkdir()
    write_sbom(python, dist / "ckptd.cdx.json")
    document = json.loads((dist / "ckptd.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "ckptd"
    found = {one["name"].lower().replace("_", "-"): one["version"] for one in document["components"]}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (line.partition(">")[0] for line in project["dependencies"]):
        assert found[name] == pinned[name]
    assert not {"torch", "pip"} & set(found)
    write_checksums(dist)
    assert run("sha256sum", "--check", "SHA256SUMS", cwd=dist) == "ckptd.cdx.json: OK\n"


def test_supported_pythons_are_named_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{SUPPORTED[0]}"
    named = [f"Programming Language :: Python :: 3.{minor}" for minor in SUPPORTED]
    assert [line for line in project["classifiers"] if ":: Python ::" in line] == named
    assert f"Python 3.{SUPPORTED[0]} to 3.{SUPPORTED[-1]}" in (ROOT / "README.md").read_text()
