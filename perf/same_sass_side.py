"""One side of same_sass.py: names or builds the kernels of the one package that is on the import path.

    python perf/same_sass_side.py list OUT                 names of the shipped set and of the fast subset
    python perf/same_sass_side.py build OUT JOBS < NAMES   a line of JSON a kernel, appended to OUT

The package may be an older one, whose names this script also knows.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lowbit_attn import compile, kernels

try:
    import windowed
    from gpu import matrix

    register = windowed.register
except ModuleNotFoundError as error:
    if error.name != "windowed":
        raise
    from lowbit_attn import gpu_matrix as matrix  # a commit before tests/ had packages

    def register() -> None:
        """Its formats are the package's own."""


def known() -> dict:
    """Every kernel of ``make`` and of the GPU tests' fast subset by its name."""
    shipped = kernels.shipped_keys if hasattr(kernels, "shipped_keys") else kernels.shipped
    found = (key for arch in kernels.ARCH_TARGETS for key in (*shipped(arch), *matrix.keys(arch)))
    return {str(key): key for key in found}


def built(key) -> dict:
    """What became of a kernel: its file, registers and shared memory, or why there is none."""
    try:
        found = compile.build(key)
    except compile.KernelCheckError as error:
        return {"error": str(error).partition(": ")[2]}
    facts = found if isinstance(found, dict) else found.facts
    return {"file": str(compile.so_path(key)), "registers": facts["registers"], "smem_bytes": facts["smem_total_bytes"]}


def main(what: str, out: str, jobs: str = "1") -> None:
    register()
    keys = known()
    if what == "list":
        Path(out).write_text(json.dumps(list(keys)))
        return
    names = json.load(sys.stdin)
    with ProcessPoolExecutor(int(jobs), initializer=register) as pool, open(out, "a") as file:
        for name, found in zip(names, pool.map(built, (keys[name] for name in names))):
            file.write(json.dumps({"name": name, **found}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
