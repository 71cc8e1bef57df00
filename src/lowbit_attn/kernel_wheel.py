"""``python -m lowbit_attn.kernel_wheel --arch hopper``: puts an architecture's built kernels into a wheel.

The wheel has no code: a package ``lowbit_attn_kernels_ARCH`` with a folder ``kernels`` in the layout of the kernel
cache (compile.py), where the loader finds them once the wheel is installed (prebuilt.py). Whoever installs it needs no
compiler. Kernels of CuTe-DSL are linked with its runtime library, which its own package brings: the wheel names it.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from lowbit_attn import compile, kernels, prebuilt, promised
from lowbit_attn.errors import KernelWheelError
from lowbit_attn.kernels import KernelKey

LIMIT_MB = 60  # largest wheel, in 10^6 bytes
PLATFORM = "linux_x86_64"
CUTE_DSL, CUTE_RUNTIME = "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13"
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "{version}"
description = "Built {arch} kernels of lowbit-attn, which serve without a compiler"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = {dependencies}

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
{package} = ["kernels/**/*"]
"""


def pack(arch: str, keys: Iterable[KernelKey], folder: Path, is_part: bool = False) -> Path:
    """Put built kernels into a wheel in ``folder``; its path.

    is_part: not all shipped kernels are among them, which the wheel's version then says ("+part"). Raises
    KernelWheelError for a kernel that is not built, and, with nothing left behind, for a wheel above LIMIT_MB.
    """
    found = {key: compile.find(key) for key in keys}
    if missing := [key for key, built in found.items() if built is None]:
        raise KernelWheelError(f"{len(missing)} of {len(found)} kernels are not built, the first is {missing[0]}; run "
                               f"make {arch}")
    if not found:
        raise KernelWheelError(f"no kernels for {arch}")
    with tempfile.TemporaryDirectory() as scratch:
        _lay_out(Path(scratch), arch, found, _version() + "+part" * is_part)
        wheel = _build(Path(scratch))
        if (size := wheel.stat().st_size) > LIMIT_MB * 1e6:
            raise KernelWheelError(f"{wheel.name} has {size / 1e6:.1f} MB, supported: at most {LIMIT_MB} MB")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, folder / wheel.name))


def _lay_out(project: Path, arch: str, found: dict[KernelKey, compile.Built], version: str) -> None:
    """Write the sources of the wheel: its pyproject.toml and a package with the kernels."""
    package = prebuilt.PACKAGES[arch]
    for key, built in found.items():
        there = project / package / "kernels" / compile.place(key) / built.path.parent.name
        there.mkdir(parents=True, exist_ok=True)
        for suffix in (".so", ".json"):
            shutil.copy(built.path.with_suffix(suffix), there)
    text = f'"""Built kernels of lowbit_attn for {arch}; the package has no code."""\n'
    (project / package / "__init__.py").write_text(text)
    (project / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {PLATFORM}\n")
    (project / "pyproject.toml").write_text(PROJECT.format(
        arch=arch, package=package, distribution=package.replace("_", "-"), version=version,
        dependencies=_toml(_needs(found.values()))))


def _needs(built: Iterable[compile.Built]) -> list[str]:
    """What a wheel with these kernels must be installed with."""
    dsls = {one.facts["built_with"].get(CUTE_DSL) for one in built} - {None}
    if len(dsls) > 1:
        raise KernelWheelError(f"kernels of {CUTE_DSL} {', '.join(sorted(dsls))} are mixed; build them with one")
    return [f"lowbit-attn=={_version()}", *(f"{CUTE_RUNTIME}=={version}" for version in dsls)]


def _version() -> str:
    return metadata.version("lowbit-attn")


def _toml(texts: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def _build(project: Path) -> Path:
    """Run setuptools on a folder of sources; the wheel."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(project / "dist"),
               str(project)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=project)
    if ended.returncode:
        last = (ended.stdout.strip().splitlines() or ["it printed nothing"])[-1]
        raise KernelWheelError(f"build failed: {last}; pip install build 'setuptools>=77'")
    wheel, = (project / "dist").glob("*.whl")
    return wheel


def main(
    arch: Annotated[str, typer.Option(help=f"One of {', '.join(prebuilt.PACKAGES)}.")],
    out: Annotated[Path, typer.Option(help="Folder of the wheel.")] = Path("dist"),
    rotation: Annotated[int, typer.Option(help="Only so many of the shipped kernels, about: those of the seed.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the rotation.")] = 0,
) -> None:
    """Put an architecture's shipped kernels, which must be built, into a wheel; print its size."""
    if arch not in prebuilt.PACKAGES:
        raise typer.BadParameter(f"{arch!r}, supported: {', '.join(prebuilt.PACKAGES)}", param_hint="--arch")
    shipped = kernels.shipped_keys(arch)
    keys = promised.rotation(shipped, rotation, seed) if rotation else shipped
    try:
        wheel = pack(arch, keys, out, is_part=bool(rotation))
    except KernelWheelError as error:
        typer.echo(f"no wheel: {error}", err=True)
        raise typer.Exit(1) from None
    size = wheel.stat().st_size / 1e6
    whole = f"; all {len(shipped)} would take about {size / len(keys) * len(shipped):.1f}" if rotation else ""
    typer.echo(f"{wheel}: {len(keys)} kernels, {size:.1f} MB of at most {LIMIT_MB}{whole}")


if __name__ == "__main__":
    typer.run(main)
