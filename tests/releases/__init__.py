"""The DeepSpeed releases that people run, each installed by itself: what ckptd makes of their saves.

`make releases` (docs/releases.md is its table). One process for each release has the release before the
environment's own DeepSpeed on its path (`measure.py`); what it has measured stays in `.build/releases`.
"""
