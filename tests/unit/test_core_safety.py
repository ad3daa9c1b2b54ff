"""What status calls safe: in a COMMIT on *every* required remote, and the newest of those (P17, P2)."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.safety import newest_safe
from tests.unit.core_views import job_view, remote_commit, save_view, sealed


def test_safe_is_what_every_required_remote_holds() -> None:
    saves = [save_view(step, sealed(step)) for step in (1, 2)]
    view = job_view(saves)
    other = replace(view.remotes[0], name="other", commits=(remote_commit(sealed(1)),))
    both = newest_safe(replace(view, remotes=(*view.remotes, other)))
    assert both is not None
    assert both.tag == "s1b1"
    optional = newest_safe(replace(view, remotes=(*view.remotes, replace(other, is_required=False))))
    assert optional is not None
    assert optional.tag == "s2b1"


def test_nothing_is_safe_without_a_commit_or_a_required_remote() -> None:
    view = job_view([save_view(1, sealed(1))])
    assert newest_safe(replace(view, remotes=())) is None
    assert newest_safe(replace(view, remotes=(replace(view.remotes[0], commits=()),))) is None
