"""``PYTHONPATH=tests python -m gpu.build``: builds the kernels of the GPU tests, without a GPU (make gpu-kernels)."""

from typing import Annotated

import typer
import windowed

from gpu import matrix
from lowbit_attn import build, kernels


def wanted(arch: str, seed: int, cases: int) -> list[kernels.KernelKey]:
    """The kernels of an architecture that the GPU tests need beyond the shipped ones."""
    return matrix.sample_keys(arch, seed, cases) if cases else matrix.keys(arch)


def main(
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    cases: Annotated[int, typer.Option(help="decode calls in the sample; 0: the fast subset")] = 0,
    force: Annotated[bool, typer.Option(help="rebuild what is up to date")] = False,
    jobs: Annotated[int | None, typer.Option(help="parallel compilations; default: one a core")] = None,
) -> None:
    """Build the kernels of the GPU tests for both architectures, and check them as the shipped ones are."""
    windowed.register()
    keys = list(dict.fromkeys(key for arch in kernels.ARCH_TARGETS for key in wanted(arch, seed, cases)))
    build.build_and_report(keys, build.new_console(), jobs, force, initializer=windowed.register)


if __name__ == "__main__":
    typer.run(main)
