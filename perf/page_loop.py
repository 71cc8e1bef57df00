"""Instructions that a warp issues for a page, counted in the SASS of a built decode kernel; needs no GPU.

The page loop is the shortest with the tensor core instructions that a page's codes take: one around it, over the items
of a warp, has those of 16-bit units too. ptxas keeps a loop's body in one piece and puts rare ways out of line, behind
EXIT; waits are short loops that a warp passes once where the data are there. So every instruction between the loop's
first and its last is counted once.
"""

import re
from pathlib import Path
from typing import NamedTuple

from lowbit_attn import kernels, sass
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.layout import PAGE_TOKENS

MULTIPLIES = ("IMMA", "HMMA")  # of warps; a warpgroup's belong to the tile path, whose warps share a page by roles
_LINE = re.compile(r"^(\.L_\w+):|^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)\S*(.*);", re.M)
_TARGET = re.compile(r"`\((\.L_\w+)\)")


class PageLoop(NamedTuple):
    """What one warp issues for one page, or for its rows of one."""

    instructions: int
    multiplies: int


def multiplies_of_codes(key: KernelKey) -> int:
    """Multiplies of m16n8k16, or of m16n8k32 on int8, that the codes of K and V in a page take: a page has up to
    twice as many with sums, centring and boosted channels."""
    fmt, depth = FORMATS[key.format], 32 if key.arithmetic == "int8" else 16
    if key.arch == "ampere":
        from lowbit_attn.ampere.config import decode_config

        path = kernels.path_name(key)
        columns = decode_config(fmt, key.head_dim, key.dtype, key.sizes or key.target, path, key.rows).columns
    else:
        from lowbit_attn.hopper.config import ARITHMETICS

        columns = ARITHMETICS[key.arithmetic].col_blocks(key.rows)
    return columns * 2 * PAGE_TOKENS * key.head_dim // (16 * depth)


def page_loop(path: Path, code_multiplies: int) -> PageLoop:
    """The page loop of the kernel in a .so; code_multiplies: of a page, which an unrolled loop has several times."""
    elf, = sass.cuda_elfs(path.read_bytes())
    loop = find_loop(sass.disassembly(elf), code_multiplies)
    pages = max(1, loop.multiplies // code_multiplies)
    return PageLoop(round(loop.instructions / pages), round(loop.multiplies / pages))


def find_loop(text: str, code_multiplies: int) -> PageLoop:
    """The shortest loop of a disassembled kernel with a page's multiplies of codes or more, or with as many as any;
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
    return min((loop for loop in loops if loop.multiplies >= min(most, code_multiplies)),
               key=lambda loop: loop.instructions)
