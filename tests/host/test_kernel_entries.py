"""Entries of the kernel cache: the hash covers the .so and its facts, and older entries are still taken."""

import hashlib
import json
from pathlib import Path

import pytest

from lowbit_attn import entries

FACTS = {"name": "read@sm_90", "key": {"target": "sm_90", "sizes": (1, 2)}, "fingerprint": "f", "tvm_ffi_abi": "0.1",
         "built_with": {"python": "3.11", "nvcc": None}, "function": "f", "smem_bytes": 1024, "smem_total_bytes": 2048,
         "registers": 40, "spills": 0, "sass": {}, "seconds": 0.5}


@pytest.fixture
def entry(tmp_path) -> Path:
    """The .json of a written entry."""
    (tmp_path / "read.tmp").write_bytes(b"binary" * 100)
    entries.write(tmp_path / "read.tmp", tmp_path / "read.so", FACTS)
    return tmp_path / "read.json"


def test_an_entry_is_read_as_it_was_written(entry):
    facts = entries.read(entry)
    assert entries.check_binary(entry, facts) == entry.with_suffix(".so")
    assert {name: facts[name] for name in FACTS} == json.loads(json.dumps(FACTS))


@pytest.mark.parametrize("change", [{"function": "other"}, {"smem_bytes": 1025}, {"more": 1}, {"sha256": "0"},
                                    {"built_with": {"python": "3.12"}}])
def test_facts_are_in_the_hash(entry, change):
    entry.write_text(json.dumps(entries.read(entry) | change))
    with pytest.raises(entries.DamagedEntryError, match="its sha256 is not its entry's"):
        entries.check_binary(entry, entries.read(entry))


@pytest.mark.parametrize("versions", [{"tilelang": 7}, {"tilelang": ["x"]}])
def test_versions_of_tools_are_text(entry, versions):
    entry.write_text(json.dumps(entries.read(entry) | {"built_with": versions}))
    with pytest.raises(entries.DamagedEntryError, match="built_with has versions that are no text"):
        entries.read(entry)


def test_entries_whose_hash_is_the_binarys_are_taken(entry):
    content = entry.with_suffix(".so").read_bytes()
    facts = entries.read(entry) | {"sha256": hashlib.sha256(content).hexdigest()}
    entry.write_text(json.dumps(facts))
    assert entries.check_binary(entry, entries.read(entry)) == entry.with_suffix(".so")
    entry.with_suffix(".so").write_bytes(content[:-1])
    with pytest.raises(entries.DamagedEntryError):
        entries.check_binary(entry, entries.read(entry))
