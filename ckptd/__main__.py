"""Entry of `python -m ckptd` and of the console script: quiet when it is interrupted while it loads."""

from __future__ import annotations


def entry() -> None:
    """Load the command line and run it; Ctrl-C before it runs is exit code 130 and no traceback."""
    try:
        import gc
        import os
        import signal
        import sys

        _open_what_is_closed()
        # looking for garbage among what was just loaded finds nothing, and takes a tenth of `status`
        gc.disable()
        # whoever starts us may have said that SIGINT is ignored
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default:
            # nothing was begun: an exception in the middle of an import could end anywhere
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        from ckptd.cli.main import main

        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        is_status = sys.argv[1:2] == ["status"]
        if not is_status:
            gc.enable()
        try:
            main()
        except SystemExit as end:
            if is_status:
                _leave(end.code)
            raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _open_what_is_closed() -> None:
    """Whoever starts us may have closed them (`>&-`): no file of ours may get the number of stdout."""
    import os
    import sys

    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 — to the end


def _leave(code: object) -> None:
    """End here: taking the interpreter apart takes longer than what `status` does, and it holds nothing."""
    import os
    import sys

    if isinstance(code, int):
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # nobody reads any more: the interpreter has its own word and exit code for that
        os._exit(code)


if __name__ == "__main__":
    entry()
