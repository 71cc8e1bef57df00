"""The command that installs an optional part of this package, worded for the place that it was installed from."""

import json
import shlex
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

DISTRIBUTION = "lowbit-attn"
SOURCES = Path(__file__).resolve().parents[2]  # the root of a clone, where the package runs from one


@cache
def remedy(extra: str) -> str:
    """The command that installs the packages of an extra.

    Where the package runs from a clone, or was installed from one, it installs ``.[extra]`` in that folder; where it
    came from a wheel or a repository, it names the same address; otherwise it names the package.
    """
    origin = _origin()
    folder = Path(unquote(urlparse(origin.get("url", "")).path)) if "dir_info" in origin else None
    if _has_sources(SOURCES):
        return f"pip install -e '.[{extra}]' in {shlex.quote(str(SOURCES))}"
    if folder and _has_sources(folder):
        return f"pip install '.[{extra}]' in {shlex.quote(str(folder))}"
    name = f"{DISTRIBUTION}[{extra}]"
    if address := origin.get("url", "") if folder is None else "":
        version_control = origin.get("vcs_info", {}).get("vcs")
        name += f" @ {f'{version_control}+' if version_control else ''}{address}"
    return f"pip install {shlex.quote(name)}"


def _has_sources(folder: Path) -> bool:
    try:
        return f'name = "{DISTRIBUTION}"' in (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _origin() -> dict:
    """What pip recorded about where the package came from; {} after an installation from an index."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        return dict(json.loads(text)) if text else {}
    except (metadata.PackageNotFoundError, OSError, ValueError, TypeError):
        return {}
