"""The command ``lowbit-attn``, also ``python -m lowbit_attn``; its own two packages come with the extra ``cli``."""

import sys

from lowbit_attn import extras

PACKAGES = ("typer", "rich")


def main() -> None:
    """Run the command line; without its packages, end with one line that says what to install."""
    try:
        from lowbit_attn.cli import app
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        sys.exit(f"lowbit-attn: {error.name} is not installed: {extras.remedy('cli')}")
    app()


if __name__ == "__main__":
    main()
