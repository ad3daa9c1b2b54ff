"""Launch files of well-known trainers, unchanged, with ckptd beside them: `python -m examples.frameworks`."""
