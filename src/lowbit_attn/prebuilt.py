"""Installed packages of built kernels, which are only read: finds them, and says why one does not serve."""

from importlib.util import find_spec
from pathlib import Path

from lowbit_attn import toolchain

PACKAGES = {arch: f"lowbit_attn_kernels_{arch}" for arch in ("hopper", "ampere")}  # as kernel_wheel.py makes them


def folders() -> list[Path]:
    """Folders of kernels in the installed packages, which are not imported for it."""
    specs = filter(None, map(find_spec, PACKAGES.values()))
    return [Path(place) / "kernels" for spec in specs for place in spec.submodule_search_locations or ()]


def why_not(root: Path, place: Path, name: str) -> str:
    """Why a package has a kernel of this name and target but not at this place; empty if it has none, or has it there.

    place: ``FINGERPRINT/TARGET-ffiABI``, as compile.place gives it.
    """
    target = place.name.rpartition("-ffi")[0]
    found = [file.parents[1].relative_to(root) for file in root.glob(f"*/{target}-ffi*/*/{name}.json")]
    if not found or place in found:
        return ""
    package, here = root.parent.name, toolchain.tvm_ffi_abi()
    if abis := [other.name.rpartition("-ffi")[2] for other in found if other.parent == place.parent]:
        return f"{package} has it for {toolchain.TVM_FFI} {', '.join(sorted(abis))}, here is {here}"
    return f"{package} has it of other sources than this lowbit_attn's; install the two of one version"
