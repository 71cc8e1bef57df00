"""How every command reads a transformers model from a folder: dtype, device and tokenizer, without any network.

A model keeps the dtype that it was published in, on a CPU as on a GPU. Folders that ``lowbit-attn quantize`` wrote are
read too.
"""

import os
from pathlib import Path

import torch

from lowbit_attn import model_dtype


def pick_device() -> str:
    """A GPU if torch sees one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_folder(folder: Path, device: str, dtype: torch.dtype | None = None, **files):
    """(model, tokenizer) in eval mode of a folder that transformers can load.

    dtype: None for the one that the model was published in. files: the folder's ``gguf_file``.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF reader's bar, beside the callers' own
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import lowbit_attn.linear.hf  # noqa: F401 (reads what quantize wrote)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **files)
    wanted = dtype or (None if files else model_dtype.of_folder(folder)) or "auto"
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=wanted, **files)
    return model.to(device).eval(), tokenizer
