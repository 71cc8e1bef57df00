"""The engine's bundle: what is kept of a wheel, which code is emptied, and pieces that make one archive again."""

import io
import random
import struct
import tarfile
import tomllib
import zipfile

import pytest
from perf_scripts import script


@pytest.fixture(scope="module")
def bundle():
    with script("engine_bundle") as module:
        yield module


def entry(architecture: int, code: bytes, head: int = 64, kind: int = 2) -> bytes:
    found = bytearray(head)
    struct.pack_into("<HHIQ", found, 0, kind, 257, head, len(code))
    struct.pack_into("<I", found, 28, architecture)
    return bytes(found) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_one_architecture_is_kept(bundle):
    old, new, other = (random.Random(i).randbytes(200 + 8 * i) for i in range(3))
    library = b"\x7fELF" + container(entry(80, old), entry(90, new, 72)) + b"text" * 9 + container(entry(80, other))
    found = bundle.emptied(library, 90)
    assert len(found) == len(library) and new in found and old not in found and other not in found
    assert found == library.replace(old, bytes(len(old))).replace(other, bytes(len(other)))
    assert bundle.emptied(b"no code" * 20, 90) == b"no code" * 20
    cut = library[: len(library) - 10]
    assert bundle.emptied(cut, 90)[-50:] == cut[-50:], "a container that ends behind the file is none"


def test_ptx_of_some_kernels_is_kept(bundle):
    """Of containers whose code names them; PTX itself is compressed, so that its names cannot be read."""
    ptx, code, other = (random.Random(i).randbytes(200 + 8 * i) for i in range(3))
    named = b"a kernel_of_this" + code + b"dim_128"
    library = container(entry(80, ptx, kind=1), entry(80, named)) + \
        container(entry(80, other, kind=1), entry(80, b"a kernel_of_this"))
    found = bundle.emptied(library, 90, (b"kernel_of_this", b"dim_128"))
    assert len(found) == len(library) and ptx in found and code not in found and other not in found
    assert ptx not in bundle.emptied(library, 90)


def test_what_is_kept_of_a_wheel(bundle, tmp_path):
    wheel = tmp_path / "vllm.whl"
    code = random.Random(3).randbytes(300)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so", "vllm/_qutlass_C.abi3.so", "vllm/vllm-rs",
                     "vllm/configs/a.json", "vllm/kernels/b.cuh", "vllm-0.33.0.dist-info/METADATA",
                     "vllm-0.33.0.dist-info/entry_points.txt", "vllm-0.33.0.dist-info/RECORD"):
            archive.writestr(name, container(entry(80, code)) if name.endswith(".so") else b"text")
    bundle.unpack_engine(wheel, tmp_path / "site", 90)
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {"vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so", "vllm/configs/a.json",
                     "vllm-0.33.0.dist-info/METADATA", "vllm-0.33.0.dist-info/entry_points.txt"}
    assert code not in (tmp_path / "site/vllm/_C_stable_libtorch.abi3.so").read_bytes()


def test_pieces_are_one_archive(bundle, tmp_path):
    stage = tmp_path / "stage"
    (stage / "site").mkdir(parents=True)
    content = random.Random(1).randbytes(300_000)
    (stage / "site/data").write_bytes(content)
    (stage / "site/data").chmod(0o777)
    sizes = bundle.pack(stage, tmp_path / "out", 100_000)
    assert sizes[:-1] == [100_000] * 3 and 0 < sizes[-1] <= 100_000
    pieces = [(tmp_path / "out" / str(n) / "piece").read_bytes() for n in range(1, len(sizes) + 1)]
    assert list(map(len, pieces)) == sizes
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces)), mode="r:xz") as archive:
        member = archive.getmember("./site/data")
        assert archive.extractfile(member).read() == content and member.mode == 0o755


def test_kernels_of_every_served_step(bundle):
    keys = bundle.kernels_of(("k4v4", "kcq4vcq2"))
    assert {key.op for key in keys} == {"decode", "paged_plan", "paged_append", "paged_copy", "paged_fill",
                                        "merge_rows"}
    assert {key.schedule for key in keys if key.op == "decode"} >= {"splits", "stream"}
    assert {key.head_dim for key in keys if key.op != "paged_plan"} == {64, 128}
    assert {key.dtype for key in keys if key.op != "paged_plan"} == {"bfloat16"}


def test_packages_have_one_version_each(bundle):
    lines = bundle.PACKAGES.read_text().split()
    assert len(lines) > 50 and len({line.split("==")[0] for line in lines}) == len(lines)
    assert all(line.count("==") == 1 for line in lines)
    assert not {"vllm", "torch", "triton"} & {line.split("==")[0] for line in lines}
    config = tomllib.loads((bundle.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ours = {line.split(">=")[0] for line in config} - {"torch", "numpy", "filelock", "safetensors"}  # come with torch
    assert ours | {"uvicorn", "fastapi"} <= {line.split("==")[0] for line in lines}
