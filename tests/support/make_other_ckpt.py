"""make_ckpt.py with a further setting of DeepSpeed's: CKPTD_DS_CONFIG holds JSON, merged section by section.

Run in its place, for settings that one or two tests need and no recipe has.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tests.support import make_ckpt

_plain = make_ckpt.ds_config


def _with_setting(r: dict[str, Any], dp: int, *, universal: bool) -> dict[str, Any]:
    config = _plain(r, dp, universal=universal)
    for section, values in json.loads(os.environ["CKPTD_DS_CONFIG"]).items():
        config[section] = {**config.get(section, {}), **values}
    return config


if __name__ == "__main__":
    make_ckpt.ds_config = _with_setting
    make_ckpt.main()
