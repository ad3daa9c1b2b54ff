"""What every section of a configuration file is made of: frozen models whose keys carry their own help.

A key's name, default and one line of help are declared where the key is; `ckptd init` prints them and the
refusals quote them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def key(default: Any, name: str, shown: str, text: str) -> Any:
    """A configuration key: its TOML name, its default as TOML text, one line of help."""
    return Field(
        default=default,
        validation_alias=name,
        description=text,
        json_schema_extra={"toml": f"{name} = {shown}"},
    )


def required(name: str, shown: str, text: str) -> Any:
    """A key without a default."""
    return Field(validation_alias=name, description=text, json_schema_extra={"toml": f"{name} = {shown}"})


class Section(BaseModel):
    """Base of every section: frozen, strict types, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
