"""List the verbs of `ckptd`: groups, modules and one line each, for `ckptd --help` without loading them."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """Name a verb's module and its line in `ckptd --help`."""

    module: str
    """Module below `ckptd.cli`; its function `register(app)` adds the verb."""
    summary: str
    """The first sentence of the verb's own help, without the stop; at most 60 characters."""


GROUPS: dict[str, dict[str, Verb]] = {
    "Every day": {
        "run": Verb("daemon.run", "Watch a save_dir: upload, verify and rotate its checkpoints"),
        "status": Verb("status.command", "Is my run safe?"),
        "ui": Verb("status.ui", "Show the status as a page in a browser, read-only"),
        "resume": Verb("checkpoints.resume", "Make save_dir resumable in place; print the path to load"),
        "restore": Verb("checkpoints.restore", "Put a committed checkpoint into another directory"),
        "list": Verb("checkpoints.listing", "List committed checkpoints, oldest first"),
        "verify": Verb("checkpoints.verify", "Prove committed checkpoints again from the remote alone"),
    },
    "Set up": {
        "init": Verb("setup.init", "Print a commented job file with every key and its default"),
        "check": Verb("setup.check", "Test permissions, disk space and remotes of jobs"),
        "service": Verb("setup.service", "Install or remove ckptd as a systemd service"),
    },
    "A running daemon": {
        "reload": Verb("daemon.reload", "Let the running daemon read its configuration again"),
        "plan": Verb("daemon.plan", "Say what retention deletes, keeps and costs"),
        "pause": Verb("daemon.pause", "Stop uploads, conversions and deletions of a job"),
        "drain": Verb("daemon.drain", "Upload what is complete before the node is taken away"),
        "events": Verb("daemon.events", "Print what happened to a job's checkpoints, by id"),
        "logs": Verb("daemon.logs", "Show what the daemon logged of a job"),
        "wait": Verb("daemon.wait", "Wait until the checkpoint of a step is committed"),
    },
    "Checkpoints": {
        "inspect": Verb("checkpoints.inspect", "Show what a folder of checkpoints or weights holds"),
        "convert": Verb("checkpoints.convert", "Convert a checkpoint to universal, weights or dcp"),
        "pin": Verb("checkpoints.pin", "Never delete this checkpoint, here or in a remote"),
        "rm": Verb("checkpoints.rm", "Delete checkpoints by name, here and in the remotes"),
        "accept": Verb("checkpoints.pin", "Upload a suspect checkpoint, or those from before ckptd"),
    },
    "Housekeeping": {
        "gc": Verb("checkpoints.gc", "Delete leftovers that nothing needs"),
        "takeover": Verb("setup.takeover", "Make the remotes of a job its own"),
        "uninstall": Verb("setup.uninstall", "Remove what ckptd put on this node"),
    },
}
"""Groups and verbs in the order of `ckptd --help`."""

VERBS: dict[str, Verb] = {name: verb for group in GROUPS.values() for name, verb in group.items()}

OLD_NAMES: dict[str, tuple[str, ...]] = {
    "adopt": ("accept", "--existing"),
    "install-service": ("service", "install"),
    "remove": ("uninstall",),
    "uninstall-service": ("service", "uninstall"),
    "unpause": ("pause", "--off"),
    "unpin": ("pin", "--remove"),
}
"""Verbs of 0.1, taken until the release after 0.2; listed nowhere."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {"doctor": ("check",)}
"""Map names that other tools use to our verbs; listed nowhere."""

EXIT_CODES: dict[int, str] = {
    0: "done, safe",
    1: "a person is needed",
    2: "usage",
    3: "behind",
    4: "nothing committed: start fresh",
    65: "damaged or refused",
    66: "not found",
    69: "remote unreachable or not ours",
    73: "target exists",
    74: "I/O error or no space",
    75: "another daemon owns it",
    77: "permission",
    78: "configuration",
}
"""Those of docs/contract.md, in a few words."""
