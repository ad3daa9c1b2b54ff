"""`python -m examples.demo`: the whole job for real on this machine, in about two minutes, judged from
outside."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ckptd.errors import CkptdError
from examples.demo.start import Request, start


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train, save, upload, convert, delete, crash, lose the node, resume: for real, judged.",
    )
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage")
    parser.add_argument("--world-size", type=int, default=2, help="ranks of the training (a power of two)")
    parser.add_argument(
        "--resume-world-size",
        type=int,
        default=0,
        help="ranks after the crash; 0: twice as many where the cores allow it, else half",
    )
    parser.add_argument("--keep", metavar="DIR", default="", help="keep everything in DIR (empty or new)")
    parser.add_argument("--out", metavar="DIR", default="quickstart-out", help="where the pictures go")
    parser.add_argument(
        "--remote",
        default="directory",
        metavar="directory|s3",
        help="a directory, or an S3 server of its own",
    )
    parser.add_argument("--short", action="store_true", help="fewer steps, smaller checkpoints")
    parser.add_argument(
        "--convert-only", action="store_true", help="only: train, convert, resume with stock DeepSpeed"
    )
    return parser


def main() -> int:
    """Run it; exit status 0 when every promise held."""
    asked = _arguments().parse_args()
    request = Request(
        stage=asked.stage,
        world_size=asked.world_size,
        resume_world_size=asked.resume_world_size,
        keep=Path(asked.keep).resolve() if asked.keep else None,
        out=Path(asked.out),
        convert_only=asked.convert_only,
        remote=asked.remote,
        short=asked.short,
    )
    try:
        start(request)
    except CkptdError as error:
        print(f"{error.message}\n  → {error.hint}" if error.hint else error.message, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
