"""The codebook file of a served model: where it is found, and what must be true of it.

A place is a file or a folder of files: the variable LOWBIT_ATTN_CODEBOOKS, or else the folder ``lowbit_attn`` in the
model's own, where vLLM looks for no weights. Of a folder that file is taken which was made for this format and model.
"""

from dataclasses import replace
from pathlib import Path

from lowbit_attn.cache.attached import check_format, identity_of
from lowbit_attn.codebooks import Codebooks, LayerCodebooks
from lowbit_attn.codebooks.file import KIND, CodebookFileError
from lowbit_attn.codebooks.identity import config_hash
from lowbit_attn.formats import Format
from lowbit_attn.integrations.vllm.names import BOOKS

BESIDE = "lowbit_attn"  # folder in a model's folder
MAKER = "lowbit-attn calibrate --model MODEL --format"


def find(place: str | None, model: str, config, format: Format) -> Codebooks:
    """Codebooks of a model for a format.

    place: a file or folder, the value of the variable; None: the folder in ``model``. config: of transformers. Raises
    CodebookFileError, naming each file and what is wrong with it, where no file fits or more than one does.
    """
    where = Path(place or Path(model, BESIDE))
    if where.is_file():
        found = Codebooks.load(where)
        if reason := why_not(found, config, format):
            raise CodebookFileError(f"codebooks: {str(where)!r} {reason}")
        return found
    if not where.is_dir():
        raise CodebookFileError(f"codebooks: no file or folder {str(where)!r}, set {BOOKS} to a file of {MAKER} "
                                f"{format}")
    fitting, others = {}, []
    for path in filter(_is_of_this_kind, sorted(where.glob("*.safetensors"))):
        books = Codebooks.load(path)
        if reason := why_not(books, config, format):
            others.append(f"{path.name!r} {reason}")
        else:
            fitting[path] = books
    if len(fitting) == 1:
        return fitting.popitem()[1]
    if fitting:
        raise CodebookFileError(f"codebooks: {', '.join(path.name for path in fitting)} in {str(where)!r} fit {format} "
                                f"alike, set {BOOKS} to one of them")
    raise CodebookFileError("; ".join((f"codebooks: no file in {str(where)!r} is of {format} and of this model, set "
                                       f"{BOOKS} to a file of {MAKER} {format}", *others)))


def why_not(books: Codebooks, config, format: Format) -> str:
    """Why codebooks cannot serve a model's format; empty if they can."""
    try:
        check_format(books, format)
    except ValueError as error:
        return f"does not fit {format}: {error}"
    if books.rope != "post":
        return (f"was made with --rope {books.rope}, supported: --rope post, for pages that requests share are packed "
                "without positions")
    stated = books.metadata.get("config_hash")
    if stated is not None and stated != config_hash(config):
        return (f"was learned from {books.metadata.get('model', 'a model')}, whose configuration is another one, "
                "supported: codebooks of this model")
    layers = config.num_hidden_layers
    return f"has {books.layers} layers, supported: {layers}, the model's" if books.layers != layers else ""


def identity(format: Format, books: Codebooks | None) -> str:
    """What bytes of pages mean: what may be shared is the same for equal ones only."""
    return identity_of(format, None if books is None else books.hash)


def of_rank(layer: LayerCodebooks, rank: int, ranks: int) -> LayerCodebooks:
    """Codebooks of the KV heads of a rank of tensor parallelism: heads are dealt out in runs, or one is repeated."""
    heads = layer.num_heads_kv
    first, count = rank * heads // ranks, max(1, heads // ranks)
    return replace(layer, **{name: x[first : first + count] for name, x in layer.tensors.items()})


def _is_of_this_kind(path: Path) -> bool:
    """Whether a safetensors file says that it has codebooks; a model's weights are not read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("kind") == KIND
    except SafetensorError:
        return False
