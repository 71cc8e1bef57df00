"""The seed of a test."""

import zlib


def seed_of(nodeid: str) -> int:
    """A number from a test's name and its file's: in another folder of tests/ the test draws the same data."""
    path, _, name = nodeid.partition("::")
    return zlib.crc32(f"tests/{path.rpartition('/')[2]}::{name}".encode())
