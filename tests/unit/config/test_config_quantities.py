"""Quantities: bits and bytes, 1000 and 1024, durations and shares; what is printed parses back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.config.quantities import (
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_share,
    show_bandwidth,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("5GB", 5 * 10**9),
        ("1.5TiB", 3 << 39),
        ("5 GB", 5 * 10**9),
        ("0B", 0),
        ("7kB", 7000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("8Gb/s", 10**9),
        ("1GB/s", 10**9),
        ("8Gbps", 10**9),
        ("800Mbit/s", 10**8),
        ("100MiB/s", 100 << 20),
        ("8Gib/s", 1 << 30),
        ("none", None),
    ],
)
def test_bandwidth_tells_bits_from_bytes(text: str, speed: int | None) -> None:
    assert parse_bandwidth(text) == speed


def test_bandwidth_is_echoed_in_both() -> None:
    assert show_bandwidth(10**9) == "1 GB/s = 8 Gb/s"
    assert show_bandwidth(20_000_000) == "20 MB/s = 160 Mb/s"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5),
        ("0.5s", 0.5),
        ("1h30m", 5400),
        ("20m", 1200),
        ("2d", 172800),
        ("1d12h", 129600),
        ("1w", 604800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_shares() -> None:
    assert parse_share("5%").of(200) == 10
    assert parse_share("1GiB").of(5) == 1 << 30
    assert str(parse_share("2.5%")) == "2.5%"


@given(st.integers(0, 10**9))
def test_shown_durations_parse_back(seconds: int) -> None:
    assert abs(parse_duration(show_seconds(seconds)) - seconds) <= max(3600, 0.05 * seconds)


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused(text: str) -> None:
    for parser in (parse_bytes, parse_share, parse_duration, parse_bandwidth):
        try:
            parser(text)
        except ValueError as error:
            assert str(error)
