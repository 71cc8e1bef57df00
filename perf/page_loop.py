"""Instructions that a warp issues for a page, counted in the SASS of a built decode kernel; needs no GPU.

The page loop is the shortest with about a page's tensor core instructions: one around it, over the items of a warp,
has those of 16-bit units too. ptxas keeps a loop's body in one piece and puts rare
ways out of line, behind EXIT; waits are short loops that a warp passes once where the data are there. So every
instruction between the loop's first and its last is counted once.
"""

import re
from pathlib import Path
from typing import NamedTuple

from lowbit_attn import kernels, sass
from lowbit_attn.kernels import KernelKey

MULTIPLIES = ("IMMA", "HMMA")  # of warps; a warpgroup's belong to the tile path, whose warps share a page by roles
_LINE = re.compile(r"^(\.L_\w+):|^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)\S*(.*);", re.M)
_TARGET = re.compile(r"`\((\.L_\w+)\)")


class PageLoop(NamedTuple):
    """What one warp issues for one page, or for its rows of one."""

    instructions: int
    multiplies: int


def multiplies_of_page(key: KernelKey) -> int:
    """About how many multiplies a page takes, by the kernel's arithmetic."""
    expected = dict(kernels.checks(key).expected)
    return next(expected[name] for name in MULTIPLIES if name in expected)


def page_loop(path: Path, expected_multiplies: int) -> PageLoop:
    """The page loop of the kernel in a .so; expected_multiplies: about what a page takes, to see an unrolled loop."""
    elf, = sass.cuda_elfs(path.read_bytes())
    loop = find_loop(sass.disassembly(elf), expected_multiplies)
    pages = max(1, round(loop.multiplies / expected_multiplies))
    return PageLoop(round(loop.instructions / pages), round(loop.multiplies / pages))


def find_loop(text: str, expected_multiplies: int) -> PageLoop:
    """The shortest loop of a disassembled kernel with half the expected multiplies or more, or with as many as any;
    ValueError without any multiplies."""
    names, labels, loops, end = [], {}, [], 0
    for label, predicate, name, rest in _LINE.findall(text):
        if label:
            labels[label] = len(names)
            continue
        names.append(name)
        if name == "EXIT" and not predicate:
            end = len(names)  # what follows is out of line: no loop spans it
        target = _TARGET.search(rest)
        if name == "BRA" and target and labels.get(target[1], -1) >= end:
            body = [n for n in names[labels[target[1]]:] if n != "NOP"]
            loops.append(PageLoop(len(body), sum(n in MULTIPLIES for n in body)))
    most = max((loop.multiplies for loop in loops), default=0)
    if not most:
        raise ValueError(f"SASS: no loop with any of {', '.join(MULTIPLIES)}, supported: kernels of the integer and "
                         "register paths")
    return min((loop for loop in loops if 2 * loop.multiplies >= min(2 * most, expected_multiplies)),
               key=lambda loop: loop.instructions)
