"""Every tensor that the package makes has its device named, so none follows the caller's default device."""

import ast
from pathlib import Path

import pytest

FACTORIES = {f"torch.{name}" for name in ("tensor", "as_tensor", "asarray", "arange", "zeros", "ones", "empty", "full",
                                          "rand", "randn", "randint", "randperm", "linspace", "eye", "scalar_tensor")}
SETTERS = ("constant", "on_own_defaults", "torch.device('cpu')")
APART = {"cli", "demo", "evaluation", "bench", "quality", "recall"}  # programs of their own, which no caller is in
SOURCE = Path(__file__).parents[2] / "src/lowbit_attn"
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0].split(".")[0] not in APART)


class Undecided(ast.NodeVisitor):
    """Calls of torch in a module that make tensors wherever the caller's default device is."""

    def __init__(self, tree: ast.Module):
        self.function, self.calls, self.users = "", {}, {}
        self.visit(tree)

    def generic_visit(self, node) -> None:
        set_by = [*getattr(node, "decorator_list", ()), *(x.context_expr for x in getattr(node, "items", ()))]
        if any(ast.unparse(x) in SETTERS for x in set_by):
            return
        outer, self.function = self.function, node.name if isinstance(node, ast.FunctionDef) else self.function
        if isinstance(node, ast.Name | ast.Attribute):
            self.users.setdefault(getattr(node, "id", getattr(node, "attr", "")), set()).add(self.function)
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
                and not any(word.arg in ("device", None) for word in node.keywords)):
            self.calls.setdefault(self.function, []).append(node.lineno)
        super().generic_visit(node)
        self.function = outer

    def lines(self) -> list[int]:
        """Their lines; a private function is left out whose users all run where a device is set."""
        def is_reached(name: str, seen: tuple = ()) -> bool:
            if not name.startswith("_") or name.startswith("__"):
                return True
            users = self.users.get(name, set()) - {*seen, name}
            return any(is_reached(user, (*seen, name)) for user in users)

        return [line for name, lines in self.calls.items() if is_reached(name) for line in lines]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_tensor_has_its_device_named(path):
    found = Undecided(ast.parse(path.read_text())).lines()
    allowed = 1 if path.name == "adapter.py" else 0  # vLLM's own place holder, which the engine puts another in
    assert len(found) == allowed, f"{path}, lines {found}: name a device, or decorate with precision.on_own_defaults"


def test_an_unnamed_device_would_be_found():
    text = """
def _inner(): return torch.zeros(3)
def _other(): return torch.ones(3)
@on_own_defaults
def outer(): return _inner()
def plain(): return _other(), torch.zeros(3, device=x), torch.empty(2, **like)
class A:
    def _method(self): self.x = torch.arange(4)
    def call(self):
        with torch.device("cpu"), y:
            torch.eye(2)
        self._method()
x = torch.tensor([])
"""
    assert Undecided(ast.parse(text)).lines() == [3, 8, 13]
