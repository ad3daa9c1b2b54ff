"""Whether an installed service may write what its job files name now; `ckptd check` tells (H32)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.config import user_name
from ckptd.install import units
from ckptd.install.paths import uncovered, writable_paths
from ckptd.install.plan import SYSTEM_UNITS, Target
from ckptd.install.units import DROP_IN, SYSTEM

if TYPE_CHECKING:
    from ckptd.config import LoadedConfig

_CONFIG = Path("/etc/ckptd")


def service_paths(
    loaded: LoadedConfig, config_dir: Path, units_dir: Path = SYSTEM_UNITS
) -> tuple[Target, tuple[str, ...]] | None:
    """The service of that configuration, and the paths it may not write; None: none is installed.

    A service in a user's own systemd may write what the user may.
    """
    user = config_dir.name if config_dir.parent == _CONFIG else user_name()
    for drop_in in sorted(units_dir.glob(f"{SYSTEM.replace('@', '@*')}.d/{DROP_IN}")):
        with contextlib.suppress(OSError):
            if units.config_dir_of(drop_in.read_text(errors="replace")) == str(config_dir.absolute()):
                user = drop_in.parent.name.partition("@")[2].removesuffix(".service.d")
    target = Target(folder=units_dir, user=user)
    try:
        text = target.drop_in.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if not units.is_ours(text):
        return None
    return target, uncovered(writable_paths(loaded), units.paths_of(text))
