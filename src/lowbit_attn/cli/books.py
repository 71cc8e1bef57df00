"""``--codebooks``: files of codebooks that commands take, matched with formats and models."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from lowbit_attn import dispatch, kernels
from lowbit_attn.cache import rope
from lowbit_attn.cache.attached import check_format
from lowbit_attn.cli.common import fail
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.prompt import LEAST_TOKENS, PROMPTS
from lowbit_attn.formats import FORMATS, Format

BooksOption = Annotated[Path | None, typer.Option(
    "--codebooks", help="A file of lowbit-attn calibrate, or prompt: learned from the text's first 1,024 tokens, of "
                        "keys before their rotary embedding (prompt-post: after it).")]
ManyBooksOption = Annotated[list[Path] | None, typer.Option(
    "--codebooks", help="A file of lowbit-attn calibrate, for formats that need one, or prompt: learned from the "
                        "text's first 1,024 tokens, of keys before their rotary embedding (prompt-post: after it); "
                        "repeatable.")]


def loaded(path: Path) -> Codebooks:
    """The codebooks of a file; ends the command for what is none."""
    try:
        return Codebooks.load(path)
    except (OSError, ValueError) as error:
        fail(error)


def fitting(fmt: Format, files: list[Path]) -> Path | None:
    """The first file for a format, None for one without codebooks; ends the command where none fits."""
    if not fmt.needs_codebooks:
        return None
    misfits = []
    for path in files:
        if str(path) in PROMPTS:
            return path
        try:
            check_format(loaded(path), fmt)
            return path
        except ValueError as error:
            misfits.append(f"{path}: {error}")
    if misfits:
        fail("; ".join(misfits))
    fail(f"codebooks: got none for format {fmt}, supported: --codebooks FILE; lowbit-attn calibrate --model MODEL "
         f"--format {fmt} makes one")


def cache_options(name: str, files: list[Path]) -> dict:
    """What a LowBitCache of a format takes beside its name: the file of its codebooks, and the torch path on a GPU
    whose kernels do not read them."""
    path = fitting(FORMATS[name], files)
    if path is None:
        return {}
    return {"codebooks": str(path), **({} if _have_kernels(FORMATS[name], path) else {"path": "reference"})}


def _have_kernels(fmt: Format, path: Path) -> bool:
    """Whether decode needs no named path: on the CPU, and where kernels read these codebooks. Not for those that are
    learned from a prompt, whose head_dim is not known here."""
    if not torch.cuda.is_available():
        return True
    if str(path) in PROMPTS:
        return False
    books, (arch, _) = loaded(path), dispatch.target_of(torch.device("cuda"))
    return not (kernels.no_codebooks(arch, fmt, books.head_dim, books.rope == "pre") or rope.missing(books))


def is_prompt(options: dict | None) -> bool:
    """Whether options of a LowBitCache have codebooks learned from the prompt."""
    return bool(options) and options.get("codebooks") in PROMPTS


def check_prompt(options: dict | None, tokens: int) -> None:
    """End the command for codebooks learned from a prompt of too few tokens."""
    if is_prompt(options) and tokens < LEAST_TOKENS:
        fail(f"codebooks: got {options['codebooks']!r} with {tokens:,} tokens to learn from, supported: "
             f"{LEAST_TOKENS:,} or more, for 256 entries a group are not learned from fewer; or a file: lowbit-attn "
             f"calibrate --model MODEL --format {options['format']} makes one")


def check_model(options: dict | None, network) -> None:
    """End the command for codebooks of another model; tell of other weights, and of a GPU that torch uses slowly."""
    if not options or "codebooks" not in options:
        return
    import warnings

    from lowbit_attn.codebooks import identity

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", identity.OtherWeightsWarning)
        try:
            if not is_prompt(options):
                identity.check_model(loaded(Path(options["codebooks"])), network)
        except ValueError as error:
            fail(error)
    for warning in found:
        typer.echo(f"warning: {warning.message}", err=True)
    if "path" in options:
        typer.echo(f"{options['format']}: no kernel reads these codebooks yet; torch reads them on the GPU, slowly",
                   err=True)


def described(books: Codebooks) -> str:
    """One line: what codebooks are for, their size and their name."""
    return (f"{books.format}, keys {'before' if books.rope == 'pre' else 'after'} their rotary embedding, "
            f"{books.layers} layers x {books.num_heads_kv} KV heads x head_dim {books.head_dim}, {books.nbytes:,} "
            f"bytes, learned from {books.metadata.get('model', 'a model that is not named')}, {books.hash[:16]}")


def warnings_of(books: Codebooks) -> list[str]:
    """What the calibration warned of."""
    return [str(warning) for warning in books.metadata.get("warnings", ())]
