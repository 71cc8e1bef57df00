from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import left_out


def cases_of(**files) -> list:
    paths = {Path("sim") / f"test_{name}.py": count for name, count in files.items()}
    return [SimpleNamespace(path=path) for path, count in paths.items() for _ in range(count)]


@pytest.mark.parametrize("parts", (1, 2, 3, 5))
def test_consecutive_seeds_take_every_case(parts):
    items, counts = cases_of(one_ptx=1, two_ptx=2, seven_ptx=7), Counter()
    for seed in range(8, 8 + parts):
        ids = {id(item) for item in left_out(items, parts, seed)}
        taken = [item for item in items if id(item) not in ids]
        assert {item.path.stem for item in taken} == {"test_one_ptx", "test_two_ptx", "test_seven_ptx"}
        counts.update(map(id, taken))
    assert counts.keys() == set(map(id, items)) and max(counts[id(item)] for item in items[-7:]) == 1


def test_all_of_other_files_stay():
    assert left_out(cases_of(emulation=9), 3, 1) == [] and len(left_out(cases_of(a_ptx=9), 3, 1)) == 6
