"""Entry of `python -m ckptd` and of the console script: quiet when it is interrupted while it loads."""

from __future__ import annotations


def entry() -> None:
    """Load the command line and run it; Ctrl-C before it runs is exit code 130 and no traceback."""
    try:
        import os
        import signal

        # whoever starts us may have said that SIGINT is ignored
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default:
            # nothing was begun: an exception in the middle of an import could end anywhere
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        from ckptd.cli.main import main

        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    entry()
