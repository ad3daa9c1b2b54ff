"""`[notify]` of ckptd.toml: who is told what, and how; URLs that are secrets stay out of the file (P15)."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict

from ckptd.config_quantities import Seconds
from ckptd.config_section import Section, key
from ckptd.config_values import check_credentials, reject

_SECRET_HOSTS = ("hooks.slack.com", "discord.com", "webhook.office.com", "logic.azure.com")
"""Services whose URLs are all that is needed to post as you."""


def _check_place(value: str) -> str:
    """`file:PATH`, or a URL that holds no secret."""
    if value.startswith("file:"):
        return check_credentials(value)
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        reject('it is a URL (https://…), or "file:PATH" where the URL stands in a file')
    if parts.password or parts.hostname.endswith(_SECRET_HOSTS):
        reject('this URL is a secret; put it into a file and write "file:PATH" (systemd: LoadCredential=)')
    return value


def _check_command(value: tuple[str, ...]) -> tuple[str, ...]:
    if value and not value[0].startswith("/"):
        reject("a command starts with an absolute path; arguments follow as further strings")
    return value


Place = Annotated[str, AfterValidator(_check_place)]
Command = Annotated[tuple[str, ...], Strict(False), AfterValidator(_check_command)]
_Span = Annotated[Seconds, Field(gt=0)]


class NotifyConfig(Section):
    """Who is told; nobody by default."""

    webhook: Place | None = key(
        None, "webhook", '"file:slack"', "POST of JSON with `text`, as Slack, Mattermost and Teams take it"
    )
    command: Command = key((), "command", '["/usr/local/bin/page"]', "the message as JSON on its stdin")
    severity: Literal["attention", "behind", "note"] = key(
        "attention", "severity", '"attention"', "problems from there on: attention | behind | note"
    )
    not_safe_after_seconds: _Span | None = key(
        None, "not_safe_after", '"2h"', "told when so much training would be lost with this node"
    )
    repeat_seconds: _Span = key(21_600.0, "repeat", '"6h"', "what lasts is told again so often")
    heartbeat: Place | None = key(
        None, "heartbeat", '"https://hc.example/uuid"', "GET each minute while every job is well"
    )
    on_complete: Command = key((), "on_complete", '["/path"]', "a hook: JSON on stdin, as are the next four")
    on_committed: Command = key((), "on_committed", '["/path"]', "a form is committed on a remote")
    on_converted: Command = key((), "on_converted", '["/path"]', "a universal form is there")
    on_pruned: Command = key((), "on_pruned", '["/path"]', "a checkpoint left this node")
    on_problem: Command = key((), "on_problem", '["/path"]', "a problem came up, whatever its severity")

    @property
    def is_wanted(self) -> bool:
        """Anybody is told anything."""
        hooks = (self.on_complete, self.on_committed, self.on_converted, self.on_pruned, self.on_problem)
        return any((self.webhook, self.command, self.heartbeat, *hooks))
