"""Packs vLLM, what it imports, this package and its built kernels for a GPU machine that has torch but no registry.

    python perf/engine_bundle.py vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl --kernels    pieces in build/engine

Of vLLM's wheel the Python and the compiled parts that a Hopper GPU needs are kept, and of those the code of one
architecture. What it imports comes as wheels, by pip, from perf/engine_packages.txt. All is one archive, cut into
pieces that fit a transfer: build/engine/1, build/engine/2, ... On the machine, in the order of their numbers:

    cat build/engine/N/piece >> /tmp/engine.tar.xz                                       for each piece
    mkdir /tmp/engine && tar xJf /tmp/engine.tar.xz -C /tmp/engine && . /tmp/engine/env.sh     after the last
    vllm serve MODEL ...      or      python3 perf/engine.py

Nothing of vLLM is part of this repository.
"""

import io
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from provenance import ROOT

from lowbit_attn import compile, emit, kernels, toolchain
from lowbit_attn.build import build_all
from lowbit_attn.formats import FORMATS

PACKAGES = Path(__file__).with_name("engine_packages.txt")
FORMATS_SERVED = ("k4v4", "k2v2", "kitty-pro", "kcq4vcq2")
# (head_dim, query rows of a KV head): Llama-3.1-8B's and SmolLM2's, with up to three drafts
SHAPES = (*((128, 4 * q_len) for q_len in range(1, 5)), *((64, 3 * q_len) for q_len in range(1, 5)))
# compiled parts that are imported on a Hopper GPU, by the beginnings of their names; all others are guarded there
COMPILED = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa2_C", "_vllm_fa3_C", "cumem_allocator", "fs_io_C",
            "spinloop")
# FlashAttention 2 comes as code for 8.0 and its PTX, which a newer GPU's driver compiles. Of vLLM's dtypes here only
# turboquant_4bit_nc needs it, for layers that it leaves in 16 bit: kept is the PTX of decode, of head_dim 128
PTX_KEPT = {"_vllm_fa2_C": (b"flash_fwd_splitkv_kernel", b"ILi128E", b"bfloat16_t")}
KEPT = (".py", ".json", ".jinja", ".txt", ".typed", ".ini", "METADATA", "LICENSE")
MIB = 1 << 20
FATBIN_MAGIC, ENTRY_LEAST, PTX = 0xBA55ED50, 64, 1  # of CUDA's containers of code for several architectures
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + ["manylinux2014_x86_64",
                                                                             "manylinux1_x86_64"]
ENVIRONMENT = """# . /tmp/engine/env.sh
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH="$ROOT/bin:$PATH" PYTHONPATH="$ROOT/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export LOWBIT_ATTN_CACHE_DIR="$ROOT/cache" LOWBIT_ATTN_COMMIT=@COMMIT@
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=WARNING
"""
COMMAND = '#!/bin/sh\nexec python3 -m vllm.entrypoints.cli.main "$@"\n'


def emptied(library: bytes, architecture: int, ptx_of: tuple[bytes, ...] = ()) -> bytes:
    """A compiled part whose code of other architectures is zeros: it keeps its size, and compresses.

    ptx_of: the PTX, of any architecture, of containers in which all of these words stand is kept, too. A container is a
    header (magic, version, its bytes, bytes of its entries) and entries: kind, bytes of the header at 4, of the code at
    8, architecture at 28.
    """
    found, magic, at = bytearray(library), struct.pack("<I", FATBIN_MAGIC), 0
    while (at := library.find(magic, at)) >= 0:
        _, version, head, size = struct.unpack_from("<IHHQ", library, at)
        if version != 1 or head != 16 or at + head + size > len(library):
            at += len(magic)
            continue
        entry, end = at + head, at + head + size
        keeps_ptx = ptx_of and all(library.find(word, at, end) >= 0 for word in ptx_of)
        while entry + ENTRY_LEAST <= end:
            head, size, built_for = (struct.unpack_from(form, library, entry + place)[0] for form, place in
                                     (("<I", 4), ("<Q", 8), ("<I", 28)))
            if head < ENTRY_LEAST or entry + head + size > end:
                break
            is_ptx = struct.unpack_from("<H", library, entry)[0] == PTX
            if built_for != architecture and not (is_ptx and keeps_ptx):
                found[entry + head : entry + head + size] = bytes(size)
            entry += head + size
        at = end
    return bytes(found)


def unpack_engine(wheel: Path, site: Path, architecture: int) -> None:
    """The parts of vLLM's wheel that a GPU of one architecture needs, into a folder of packages."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = Path(entry.filename).name
            if name.endswith(".so"):
                if part := next((part for part in COMPILED if name.startswith(part)), None):
                    kept = emptied(archive.read(entry), architecture, PTX_KEPT.get(part, ()))
                    _write(site / entry.filename, kept)
            elif name.endswith(KEPT) or name == "entry_points.txt":
                _write(site / entry.filename, archive.read(entry))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def unpack_packages(wheels: Path, site: Path) -> None:
    """What vLLM imports: wheels that pip fetches into ``wheels``, for Python 3.12, without what those want in turn."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                    "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi",
                    "none", *platforms, "-d", str(wheels), "-r", str(PACKAGES)], check=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def unpack_ourselves(scratch: Path, site: Path) -> None:
    """This package as it would be installed, with the runtime that its CuTe-DSL kernels are linked with."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(scratch),
                    str(ROOT)], check=True)
    wheel, = scratch.glob("lowbit_attn-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    if runtime := toolchain.site_file(emit.CUTE_RUNTIME):
        _write(site / emit.CUTE_RUNTIME, Path(runtime).read_bytes())


def kernels_of(formats: tuple[str, ...] = FORMATS_SERVED) -> list[kernels.KernelKey]:
    """What an engine's steps launch on Hopper in bfloat16: the plan, what stores and reads tokens, and decode on every
    schedule."""
    found = {}
    for name in formats:
        for head_dim, rows in SHAPES:
            (path, rows), _ = kernels.pick("hopper", FORMATS[name], head_dim, torch.bfloat16, rows)
            found |= dict.fromkeys(kernels.paged_keys("sm_90a", "bfloat16", head_dim, FORMATS[name]))
            for other in (path, *kernels.other_ctas("hopper", path)):
                picked, _ = kernels.pick("hopper", FORMATS[name], head_dim, torch.bfloat16, rows, other)
                if picked:
                    key = kernels.decode_key("hopper", "sm_90a", "bfloat16", head_dim, name, *picked)
                    found[key] = None
    return list(found)


def copy_kernels(keys: list[kernels.KernelKey], cache: Path) -> None:
    """Built kernels, each at its place in a kernel cache; KeyError for one that is not built."""
    for key in keys:
        built = compile.find(key)
        if built is None:
            raise KeyError(f"{key} is not built")
        folder = cache / "kernels" / compile.place(key) / built.path.parent.name
        for file in (built.path, built.path.with_suffix(".json")):
            _write(folder / file.name, file.read_bytes())


class Pieces(io.RawIOBase):
    """A stream that ends up in files OUT/1/piece, OUT/2/piece, ..., none larger than ``limit`` bytes."""

    def __init__(self, out: Path, limit: int):
        self.out, self.limit, self.sizes = out, limit, []
        self.file = None

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            if self.file is None or self.sizes[-1] == self.limit:
                self.close_piece()
                self.sizes.append(0)
                folder = self.out / str(len(self.sizes))
                folder.mkdir(parents=True)
                self.file = open(folder / "piece", "wb")
            some = rest[: self.limit - self.sizes[-1]]
            self.file.write(some)
            self.sizes[-1] += len(some)
            rest = rest[len(some) :]
        return len(data)

    def close_piece(self) -> None:
        if self.file is not None:
            self.file.close()


def pack(stage: Path, out: Path, limit: int) -> list[int]:
    """A folder as an archive in pieces; their bytes."""
    pieces = Pieces(out, limit)
    with tarfile.open(fileobj=pieces, mode="w|xz") as archive:
        archive.add(stage, arcname=".", filter=_of_nobody)
    pieces.close_piece()
    return pieces.sizes


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member that only its owner, whoever unpacks it, may write: kernels of others are not loaded."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= 0o755
    return member


def main(
    wheel: Annotated[Path, typer.Argument(exists=True, help="vLLM's wheel for CUDA, as pip downloads it.")],
    out: Annotated[Path, typer.Option(help="Folder of the pieces, made anew.")] = Path("build/engine"),
    limit: Annotated[float, typer.Option(help="Largest piece in MiB.")] = 54.0,
    wheels: Annotated[Path, typer.Option(help="Folder that pip downloads into.")] = Path("build/engine-wheels"),
    with_kernels: Annotated[bool, typer.Option("--kernels", help="Build our kernels, and take them along.")] = False,
    add: Annotated[list[Path] | None, typer.Option(help="Folders to take along, found in models/NAME there.")] = None,
) -> None:
    """Make the pieces, and print their sizes."""
    from provenance import commit

    shutil.rmtree(out, ignore_errors=True)
    stage, keys = out / "stage", kernels_of() if with_kernels else []
    unpack_engine(wheel, stage / "site", 90)
    unpack_packages(wheels, stage / "site")
    unpack_ourselves(out / "ours", stage / "site")
    if failed := [f"{key}: {error}" for key, error in build_all([k for k in keys if not compile.find(k)]) if error]:
        print("\n".join(failed))
        raise typer.Exit(1)
    copy_kernels(keys, stage / "cache")
    for folder in add or []:
        shutil.copytree(folder, stage / "models" / folder.name)
    _write(stage / "env.sh", ENVIRONMENT.replace("@COMMIT@", commit()).encode())
    _write(stage / "bin" / "vllm", COMMAND.encode())
    (stage / "bin" / "vllm").chmod(0o755)
    for number, size in enumerate(pack(stage, out, int(limit * MIB)), 1):
        print(f"{out / str(number) / 'piece'}: {size / MIB:.1f} MiB")
    shutil.rmtree(stage)


if __name__ == "__main__":
    typer.run(main)
