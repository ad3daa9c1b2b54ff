"""Compute CRC64NVME, the checksum of every file in a manifest: fast as memory, and those of parts combine."""

from __future__ import annotations


def crc64(data: bytes | memoryview, previous: int = 0) -> int:
    """Return the CRC64NVME of `data`, going on from `previous` (awscrt, imported on first use: 5 MB)."""
    from awscrt.checksums import crc64nvme

    return int(crc64nvme(data, previous))


def crc64_combined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC64NVME of two adjoining ranges from those of each; under a microsecond."""
    from awscrt.checksums import combine_crc64nvme

    return int(combine_crc64nvme(first, second, second_bytes))


def crc32_combined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32 of two adjoining ranges from the CRC32 of each, as zip archives use it."""
    from awscrt.checksums import combine_crc32

    return int(combine_crc32(first, second, second_bytes))


def to_hex(value: int) -> str:
    """Format a CRC as 16 lower-case hex digits, as in manifests."""
    return f"{value:016x}"


def from_hex(text: str) -> int:
    """Parse what `to_hex` formatted."""
    return int(text, 16)
