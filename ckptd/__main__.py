"""`python -m ckptd`: the same entry as the console script, for environments without one on PATH."""

from ckptd.cli.main import main

if __name__ == "__main__":
    main()
