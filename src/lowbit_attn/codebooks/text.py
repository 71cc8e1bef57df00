"""Text that codebooks are learned from: files of the user's, or a mixture that every Python installation has.

Variety beats closeness: codebooks of one kind of text lose up to 40 % of KL on another, those of a mixture of foreign
kinds nothing (docs/codebooks.md). The mixture takes Python's help topics, sources of its standard library and the
licences of what is installed in turn, and has no line of the text that the package's demo reads.
"""

import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from pydoc_data.topics import topics

import torch

from lowbit_attn import text_file, tokenizing

TOPICS = 40  # of Python's help texts, enough for the 2,048 tokens that the demo reads
LEAST_TOKENS = 1024
PIECE_CHARACTERS = 3000  # of one document before the next kind of text takes its turn
MODULES = ("typing", "tarfile", "inspect", "datetime", "subprocess", "mailbox", "argparse", "pathlib", "zipfile")


def help_text(count: int | None = TOPICS) -> str:
    """English prose that every Python installation has: its first ``count`` topics, None: all."""
    return "\n".join(topics[key] for key in sorted(topics)[:count])


def mixture(exclude: str = "") -> Iterator[str]:
    """Pieces of about 3,000 characters: help topics, sources and licences in turn, until all are at their end.

    exclude: a text no line of which may occur, beside the demo's own text. The same installation gives the same pieces.
    """
    unwanted = _lines(help_text()) | _lines(exclude)
    kinds = [_pieces(documents, unwanted) for documents in (_other_topics(), _sources(), _licences())]
    for turn in zip_longest(*kinds):
        yield from (piece for piece in turn if piece is not None)


def read_files(paths: Iterable[Path]) -> Iterator[str]:
    """The files' texts; ValueError for what is no text in UTF-8."""
    for path in paths:
        yield text_file.read(path)


def tokenized(tokenizer, pieces: Iterable[str], tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens of the pieces as one text, int64 [<= tokens], special tokens at its start alone.

    tokenizer: of transformers. Raises ValueError for a text of fewer than 1,024 tokens.
    """
    found: list[int] = []
    for piece in pieces:
        found += tokenizer(piece, add_special_tokens=False).input_ids if found else tokenizing.encode(tokenizer, piece)
        if len(found) >= tokens:
            break
    if len(found) < LEAST_TOKENS:
        raise ValueError(f"text: got {len(found)} tokens, supported: {LEAST_TOKENS} or more, of varied text; "
                         "256 entries are not learned from fewer")
    return torch.tensor(found[:tokens], device="cpu")


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


def _pieces(documents: list[str], unwanted: set[str]) -> Iterator[str]:
    """A piece of each document, then the next piece of each; lines stay whole."""
    cut = [list(_cut(document, unwanted)) for document in documents]
    for turn in zip_longest(*cut):
        yield from (piece for piece in turn if piece is not None)


def _cut(document: str, unwanted: set[str]) -> Iterator[str]:
    piece, size = [], 0
    for line in document.splitlines():
        if line.strip() in unwanted:
            continue
        piece.append(line)
        size += len(line) + 1
        if size >= PIECE_CHARACTERS:
            yield "\n".join(piece) + "\n"
            piece, size = [], 0
    if size:
        yield "\n".join(piece) + "\n"


def _other_topics() -> list[str]:
    return [topics[key] for key in sorted(topics)[TOPICS:]]


def _sources() -> list[str]:
    """Sources of the standard library; a module that this Python has not, or as a package, is passed over."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for name in MODULES for path in (folder / f"{name}.py", folder / name / "__init__.py")]
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def _licences() -> list[str]:
    """Python's own licence and those of installed distributions, by name, each text once."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / "LICENSE.txt", folder.parent / "LICENSE.txt"]
    for found in sorted(metadata.distributions(), key=lambda found: found.metadata["Name"] or ""):
        names = sorted(file for file in found.files or [] if file.name.upper().startswith(("LICENSE", "COPYING")))
        paths += [Path(found.locate_file(name)) for name in names]
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in paths
             if path.is_file() and path.suffix not in (".py", ".pyc"))
    return list({_title(text): text for text in reversed(list(texts))}.values())[::-1]


def _title(text: str) -> str:
    """What tells whether two licences are one text: how they begin, names and years apart."""
    return "".join(text.split())[:400]
