"""Build what a release consists of into dist/: sdist, wheel, SBOM, image and checksums (`make release`)."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ckptd import __version__

ROOT = Path(__file__).resolve().parents[1]
BUILDERS = ("docker", "podman", "buildah")
"""Of images; the first that works here is taken."""


def build_packages(dist: Path) -> Path:
    """Build sdist and wheel; return the wheel."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", dist], cwd=ROOT, check=True)
    (wheel,) = dist.glob("*.whl")
    return wheel


def make_environment(wheel: Path, home: Path) -> Path:
    """Install the wheel at the versions of constraints.txt, without pip; return its Python."""
    python = home / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    options = ("-q", "--no-compile", "-c", ROOT / "constraints.txt")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], cwd=ROOT, check=True
    )
    return python


def write_sbom(python: Path, out: Path) -> None:
    """Write the packages of an environment as CycloneDX JSON, the same for the same versions."""
    tool = Path(sys.executable).with_name("cyclonedx-py")
    options = ("--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--output-file", out)
    subprocess.run([tool, "environment", *options, python], check=True)


def find_builder() -> str:
    """Return the first of BUILDERS that works here; empty: none does."""
    return next((tool for tool in BUILDERS if shutil.which(tool) and _works(tool)), "")


def _works(tool: str) -> bool:
    """Whether it answers; docker's command without its daemon does not."""
    done = subprocess.run([tool, "info"], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def build_image(tool: str, base: str, out: Path) -> None:
    """Build the Dockerfile on `base` (empty: its own) and save the image, as `docker load` takes it."""
    name = f"ckptd:{__version__}"
    argument = ["--build-arg", f"BASE={base}"] if base else []
    # the format of docker: OCI's has no health check
    environment = os.environ | {"BUILDAH_FORMAT": "docker"}
    subprocess.run([tool, "build", *argument, "-t", name, "."], cwd=ROOT, env=environment, check=True)
    save = ["push", name, f"docker-archive:{out}:{name}"] if tool == "buildah" else ["save", "-o", out, name]
    subprocess.run([tool, *save], env=environment, check=True)


def write_checksums(dist: Path) -> None:
    """Write SHA256SUMS over all files of `dist`, for `sha256sum --check`."""
    files = sorted(path for path in dist.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (dist / "SHA256SUMS").write_text("".join(lines))


def main() -> int:
    """Build all of it; an image only where a builder works, and say so where none does.

    Returns 1 when a builder was there and did not build it; the rest is in `dist` all the same.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="emptied first")
    parser.add_argument("--base", default="", help="of the image; default as the Dockerfile says")
    chosen = parser.parse_args()
    dist: Path = chosen.dist
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    wheel = build_packages(dist)
    with tempfile.TemporaryDirectory() as home:
        write_sbom(make_environment(wheel, Path(home)), dist / f"ckptd-{__version__}.cdx.json")
    failed = False
    if builder := find_builder():
        try:
            build_image(builder, chosen.base, dist / f"ckptd-{__version__}-image.tar")
        except subprocess.CalledProcessError:
            failed = True
            print(f"image: {builder} did not build it (see above); make release BASE=IMAGE: another base")
    else:
        print(f"image: left out, none of {', '.join(BUILDERS)} works here")
    write_checksums(dist)
    print((dist / "SHA256SUMS").read_text(), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
