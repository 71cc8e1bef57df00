from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import left_out


def items_of(file: str, **cases) -> list:
    return [SimpleNamespace(path=Path(file), parent=0, originalname=name)
            for name, count in cases.items() for _ in range(count)]


@pytest.mark.parametrize("parts", (1, 2, 3, 5))
def test_consecutive_seeds_take_every_case(parts):
    items, counts = items_of("sim/test_a_ptx.py", one=1, two=2, seven=7), Counter()
    for seed in range(8, 8 + parts):
        ids = {id(item) for item in left_out(items, parts, seed)}
        taken = [item for item in items if id(item) not in ids]
        assert {item.originalname for item in taken} == {"one", "two", "seven"}
        counts.update(map(id, taken))
    assert counts.keys() == set(map(id, items)) and max(counts[id(item)] for item in items[-7:]) == 1


def test_all_of_other_files_stay():
    assert left_out(items_of("sim/test_a_emulation.py", many=9), 3, 1) == []
    assert len(left_out(items_of("sim/test_a_ptx.py", many=9), 3, 1)) == 6
