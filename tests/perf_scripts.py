"""Scripts of perf/, imported by tests as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

PERF = Path(__file__).resolve().parents[1] / "perf"


@contextmanager
def script(name: str) -> Iterator[ModuleType]:
    """perf/NAME.py as a module that finds its neighbours; it is registered, as its dataclasses ask, for the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PERF))
        spec = importlib.util.spec_from_file_location(f"perf_{name}", PERF / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
