"""docs/configuration.md, made from the models; `python -m tests.support.configuration_page` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from ckptd.config.environment import variables
from ckptd.config.retention import Retention
from ckptd.config.s3 import S3Keys
from ckptd.config.schema import DaemonConfig, JobConfig, LayoutConfig, LocalConfig, NotifyConfig, RemoteConfig
from ckptd.config.section import Section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Made from the models by `python -m tests.support.configuration_page`; a test compares. -->

A job is a TOML file in `jobs.d/` of the configuration directory, or any file that you name
(`ckptd run FILE`). The configuration directory is `--config-dir`, else `$CKPTD_CONFIG_DIR`, else
`$XDG_CONFIG_HOME/ckptd`, else `/etc/ckptd/<user>`. `ckptd.toml` beside `jobs.d/` is about the
daemon as a whole. `ckptd init SAVE_DIR URL` prints a job file with every key, and
`ckptd check FILE` tests one. `ckptd init --list` lists
whole files, `ckptd init --example NAME` prints one.

Quantities are strings with units. An unknown key or a wrong value is refused with the nearest valid
key (exit code 78): that job does not run, the others do.

The second column is the default, unless it says *example* or *required*. Variables are for a single
job without a file; lists have commas, tags are written as `key=value,…`:

```sh
CKPTD_SAVE_DIR=/nvme/run CKPTD_URL=s3://bucket/run CKPTD_SETTLE=10s ckptd run
```
"""
OF: dict[type[Section], tuple[str, ...]] = {
    JobConfig: ("job",),
    LayoutConfig: ("layout",),
    LocalConfig: ("local",),
    RemoteConfig: ("remote",),
    DaemonConfig: ("daemon",),
    Retention: ("local", "remote"),
    S3Keys: ("remote",),
    NotifyConfig: (),
}
"""In which sections of the environment the keys of a model stand."""
TABLES = ("ephemeral", "ladder")
"""What no text of a variable can say."""
SECTIONS: tuple[tuple[str, str, type[Section], type[Section] | None], ...] = (
    ("A job", "The top of a job file.", JobConfig, None),
    (
        "[layout]",
        "Checkpoints that ckptd does not recognise by itself ([Trainers](integrations.md#anything-else)).",
        LayoutConfig,
        None,
    ),
    (
        "[local]",
        "What is kept on this node, beside the [retention](#retention) keys.",
        LocalConfig,
        Retention,
    ),
    (
        "[[remote]]",
        "One table for each place, beside the [retention](#retention) keys.",
        RemoteConfig,
        Retention,
    ),
    (
        "Retention",
        "In `[local]` and in each `[[remote]]`. A checkpoint is kept if any key keeps it.",
        Retention,
        None,
    ),
    ("S3", "In a `[[remote]]` whose URL begins with `s3://`.", S3Keys, None),
    ("ckptd.toml", "The daemon as a whole.", DaemonConfig, None),
    ("[notify]", "In `ckptd.toml`: who is notified of what.", NotifyConfig, None),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(*section) for section in SECTIONS)])


def _section(title: str, text: str, model: type[Section], without: type[Section] | None) -> str:
    inherited: set[str] = set(without.model_fields) if without else set()
    if model is RemoteConfig:
        inherited |= set(S3Keys.model_fields)
    rows = [_row(model, name) for name in model.model_fields if name not in inherited and _shown(model, name)]
    head = "| key | default or example | what | variable |\n|---|---|---|---|"
    return "\n".join([f"## {title}", text, "", head, *rows, ""])


def _shown(model: type[Section], name: str) -> str:
    """The key's line of TOML; "" where it is a table of its own."""
    extra = model.model_fields[name].json_schema_extra
    return str(extra["toml"]) if isinstance(extra, dict) else ""


def _row(model: type[Section], name: str) -> str:
    field = model.model_fields[name]
    key, _, value = _shown(model, name).partition(" = ")
    is_example = field.default in (None, ()) and key != "scrub"
    kind = "*required* " if field.is_required() else "*example* " if is_example else ""
    names = [_variables_of(place, key)[:1] for place in OF[model] if key not in TABLES]
    variables = ", ".join(f"`{name}`" for found in names for name in found)
    return f"| `{key}` | {kind}`{_cell(value)}` | {_cell(field.description or '')} | {variables} |"


def _variables_of(section: str, key: str) -> list[str]:
    """Names under which a key is set, shortest first."""
    found = (name for name, made in variables().items() if (made.section, made.key) == (section, key))
    return sorted(found, key=len)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} written", file=sys.stderr)
