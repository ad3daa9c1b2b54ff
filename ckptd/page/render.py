"""Write the page as HTML: the template escapes every text, and the policy lets no other script run."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd import __version__
from ckptd.errors import UsageError

if TYPE_CHECKING:
    import jinja2

    from ckptd.page.view import Page

_HERE = Path(__file__).parent
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Ccircle cx='8' cy='8' r='7' fill='%232da44e'/%3E"
    "%3Cpath d='M4.5 8.3l2.4 2.4 4.6-5' fill='none' stroke='white' stroke-width='2'/%3E%3C/svg%3E"
)


def page_html(page: Page) -> str:
    """Return a whole page with everything in it, for a file."""
    # a file has no headers: what only they can forbid is left out
    return _template("page.html").render(**_shell(), page=page, policy=_policy(is_live=False))


def shell_html() -> str:
    """Return the page without a job, which asks for them."""
    return _template("page.html").render(**_shell(), page=None, policy="")


def jobs_html(page: Page) -> str:
    """Return the part of the page that changes."""
    return _template("jobs.html").render(page=page)


def live_policy() -> str:
    """Return the Content-Security-Policy of the page that asks for its jobs."""
    return _policy(is_live=True)


def _policy(*, is_live: bool) -> str:
    """Forbid everything but the page's own style and script, by their hashes."""
    parts = [
        "default-src 'none'",
        f"style-src {_hash_of('page.css')}",
        f"script-src {_hash_of('page.js')}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    ]
    if is_live:
        parts += ["trusted-types ckptd", "connect-src 'self'", "frame-ancestors 'none'"]
    else:
        parts.append("trusted-types 'none'")
    return "; ".join(parts)


def _hash_of(name: str) -> str:
    digest = hashlib.sha256(_text(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _shell() -> dict[str, object]:
    from markupsafe import Markup

    # files of ours, whose hashes the policy has: they must not be changed by escaping
    style, script = Markup(_text("page.css")), Markup(_text("page.js"))  # noqa: S704
    return {"style": style, "script": script, "icon": _ICON, "version": __version__}


@cache
def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError as error:
        msg = f"the page needs Jinja2, which cannot be loaded ({error})"
        raise UsageError(msg, hint="pip install 'ckptd[ui]'") from error

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)
