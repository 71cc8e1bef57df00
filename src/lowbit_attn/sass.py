"""Reads the SASS of built kernels without a GPU: mnemonic counts, registers, stack, static shared memory.

Needs nvdisasm and cuobjdump (pip: nvidia-cuda-nvdisasm, nvidia-cuda-cuobjdump, or a CUDA toolkit).
"""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit_attn.toolchain import find_tool

ELF_MAGIC = b"\x7fELF\x02"
EM_CUDA = 190
NOBITS = 8  # type of a section without content
# CUDA keeps the first KiB of a block's shared memory to itself from sm_90 on, outside the limit that a block may use
RESERVED_SMEM_BYTES = {"sm_90": 1024, "sm_90a": 1024}
SPILLS = ("LDL", "STL")  # the cubin's LOCAL stays 0 even when ptxas spills
_MNEMONIC = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)(?=[\s;])", re.M)


@dataclass(frozen=True)
class KernelSass:
    """One kernel of a cubin: ``ops`` counts each mnemonic with and without its suffixes (LDS, LDS.128)."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    ops: Counter

    def missing(self, needed: Sequence[str]) -> list[str]:
        """Needed mnemonics that are absent; "A|B" is met by either."""
        return [names for names in needed if not any(self.ops[name] for name in names.split("|"))]


def inspect(path: Path) -> list[KernelSass]:
    """Every CUDA kernel embedded anywhere in a .so, .o or .cubin."""
    return inspect_bytes(path.read_bytes())


def inspect_bytes(blob: bytes) -> list[KernelSass]:
    """Every CUDA kernel embedded anywhere in the bytes of such a file."""
    return [kernel for elf in cuda_elfs(blob) for kernel in _inspect_elf(elf)]


def cuda_elfs(blob: bytes) -> Iterator[bytes]:
    """The cubins inside a file: both DSLs keep theirs as plain data, where cuobjdump does not look."""
    at = 0
    while (at := blob.find(ELF_MAGIC, at)) >= 0:
        if struct.unpack_from("<H", blob, at + 18)[0] == EM_CUDA:
            phoff, shoff = struct.unpack_from("<QQ", blob, at + 32)
            phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", blob, at + 54)
            yield blob[at : at + max(shoff + shentsize * shnum, phoff + phentsize * phnum)]
        at += 4


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every section of a cubin, in its order; one that takes no place in the file has no content."""
    shoff, = struct.unpack_from("<Q", elf, 40)
    shentsize, shnum, shstrndx = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, shoff + i * shentsize) for i in range(shnum)]
    names = headers[shstrndx][4]
    for name_at, kind, _, _, offset, size in headers:
        start = names + name_at
        yield elf[start : elf.index(b"\0", start)].decode(), b"" if kind == NOBITS else elf[offset : offset + size]


def disassembly(elf: bytes) -> str:
    """SASS of a cubin as nvdisasm prints it, with labels; without its dataflow analysis, a fifth of its time."""
    return _on_cubin(elf, "nvdisasm", "-c", "-ndf")


def _inspect_elf(elf: bytes) -> Iterator[KernelSass]:
    text, usage = disassembly(elf), _on_cubin(elf, "cuobjdump", "-res-usage")
    ops = Counter()
    for name, suffix in _MNEMONIC.findall(text):
        ops[name] += 1
        for end in [m.end() for m in re.finditer(r"\.\w+", suffix)]:
            ops[name + suffix[:end]] += 1
        if ".128" in suffix:
            ops[name + ".128"] += suffix[:4] != ".128"
    arch = re.search(r"sm_\d+\w?", text).group(0)
    for name, line in re.findall(r"Function (\S+?):\s*\n\s*(REG.*)", usage):
        value = {key: int(number) for key, number in re.findall(r"(REG|STACK|SHARED):(\d+)", line)}
        static_smem_bytes = max(0, value["SHARED"] - RESERVED_SMEM_BYTES.get(arch, 0))
        yield KernelSass(name, arch, value["REG"], value["STACK"], static_smem_bytes, ops)


def _on_cubin(elf: bytes, tool: str, *args: str) -> str:
    """What a tool prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(elf)
        file.flush()
        return subprocess.run([find_tool(tool), *args, file.name], capture_output=True, text=True, check=True).stdout
