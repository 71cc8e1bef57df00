"""Tensors of published AQLM and QuIP# checkpoints as VQWeight: one linear layer a call.

State: the tensors of one layer by their names in the checkpoint, without the layer's own prefix.
"""

import math
from collections.abc import Mapping

import torch

from lowbit_attn.linear import hadamard
from lowbit_attn.linear.formats import format_named
from lowbit_attn.linear.weight import VQWeight

AQLM_FORMATS = {(2, 256): "aqlm_2x8", (2, 4096): "aqlm_2x12", (1, 65536): "aqlm_1x16"}
QUIP_STAGES = {7: ("e8p2", 1), 17: ("e8p4", 2)}  # by codebook_id: E8P12, E8P12RVQ4B
QUIP_RESIDUAL_SCALE = 3.45
QUIP_ORDERS = (1, 12, 20, 28, 36, 52, 60, 108, 140, 156, 172)  # whose published matrices are those of ``hadamard``


def from_aqlm(state: Mapping[str, torch.Tensor]) -> VQWeight:
    """The weight of one AQLM layer (package ``aqlm``): 2 codebooks of 8 or 12 bits, or 1 of 16, groups of 8 inputs.

    state: codes, int8 or int16 [n, k/8, books]; codebooks [books, entries, 1, 8]; scales [n, 1, 1, 1]. A bias is the
    caller's to keep. Raises ValueError for missing tensors, shapes or codebooks that no format has.
    """
    codes, codebooks, scales = _tensors(state, "codes", "codebooks", "scales")
    if codebooks.dim() != 4 or codebooks.shape[2:] != (1, 8) or tuple(codebooks.shape[:2]) not in AQLM_FORMATS:
        raise ValueError(f"codebooks: got shape {list(codebooks.shape)}, supported: "
                         + ", ".join(f"[{books}, {size}, 1, 8]" for books, size in AQLM_FORMATS))
    books, size = codebooks.shape[:2]
    if codes.dim() != 3 or codes.shape[2] != books or codes.dtype.is_floating_point:
        raise ValueError(f"codes: got {codes.dtype} {list(codes.shape)}, supported: integers [n, k / 8, {books}]")
    if scales.numel() != codes.shape[0]:
        raise ValueError(f"scales: got shape {list(scales.shape)}, supported: [{codes.shape[0]}, 1, 1, 1]")
    for name, values in (("codebooks", codebooks), ("scales", scales)):
        if not values.float().isfinite().all():
            raise ValueError(f"{name}: got a NaN or an infinity, supported: finite values")
    codebooks, unit = _to_half(codebooks[:, :, 0].float())
    k, scales = codes.shape[1] * 8, scales.float().flatten() * unit
    if not scales.isfinite().all():
        raise ValueError("codebooks, scales: got weights beyond fp32, supported: finite weights")
    planes = format_named(AQLM_FORMATS[books, size]).pack(codes.long() % size, codebooks, scales, k)
    return VQWeight(AQLM_FORMATS[books, size], codes.shape[0], k, planes)


def _to_half(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(values divided by a power of two in fp16, that power): fp16 as they are where they fit, as bfloat16 may not."""
    largest = values.abs().max().item()
    unit = 1.0 if 2**-8 <= largest <= 60000 or largest == 0 else 2.0 ** math.floor(math.log2(largest))
    return (values / unit).half(), unit


def from_quip_sharp(state: Mapping[str, torch.Tensor],
                    residual_scale: float = QUIP_RESIDUAL_SCALE) -> VQWeight:
    """The weight of one QuIP# layer with codebook E8P12 (e8p2) or E8P12RVQ4B (e8p4), weights version 1.

    state: Qidxs, int64 [n, k/32] a stage, of which residual codes are the second half of the columns; SU [k]; SV [n];
    codebook_id; Wscale, where it is not part of SV already; scaleWH [k] where the layer was rescaled. n must be a
    multiple of 16 and k of 64, as in every such checkpoint. residual_scale: the checkpoint's resid_scale_override
    where its configuration has a positive one. A fused layer (qkv_proj, upgate_proj) is one weight, whose
    fuse_scales are the caller's to apply. Raises ValueError for other tensors.
    """
    codes, su, sv, ident = _tensors(state, "Qidxs", "SU", "SV", "codebook_id")
    ident = int(ident)
    if ident not in QUIP_STAGES:
        raise ValueError(f"codebook_id: got {ident}, supported: "
                         + ", ".join(f"{number} ({name})" for number, (name, _) in QUIP_STAGES.items()))
    if state.get("A") is not None or state.get("B") is not None:
        raise ValueError("state: got low-rank tensors A and B, supported: layers without them")
    if not 0 < residual_scale < math.inf:
        raise ValueError(f"residual_scale: got {residual_scale}, supported: a positive finite number")
    name, stages = QUIP_STAGES[ident]
    n, k = sv.numel(), su.numel()
    if codes.dtype != torch.int64 or tuple(codes.shape) != (n, k // 32 * stages) or n % 16 or k % 64:
        raise ValueError(f"Qidxs: got {codes.dtype} {list(codes.shape)} for {n} x {k}, supported: int64 [n, k / 32 x "
                         f"{stages}], n a multiple of 16 and k of 64 (weights version 1)")
    for side, size in (("SV", n), ("SU", k)):
        if hadamard.base_order(size) not in QUIP_ORDERS:
            raise ValueError(f"{side}: got {size} entries, supported: powers of two times one of {QUIP_ORDERS}")
    in_scale, out_scale = su.float(), sv.float() * float(state.get("Wscale", 1.0))
    if state.get("scaleWH") is not None:
        in_scale = in_scale / state["scaleWH"].float()
    if not (in_scale.isfinite().all() and out_scale.isfinite().all()):
        raise ValueError("SU, SV, Wscale, scaleWH: got a NaN or an infinity, supported: finite values")
    unpacked = torch.stack([_quip_codes(part, n, k) for part in codes.chunk(stages, 1)], -1)
    scales = torch.tensor([1.0, 1 / residual_scale][:stages], dtype=torch.float32, device=codes.device)
    return VQWeight(name, n, k, format_named(name).pack(unpacked, scales, in_scale, out_scale))


def _quip_codes(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Codes, int64 [n, k/8], of one stage, int64 [n, k/32]: a word has two rows of two neighbouring vectors.

    Bytes 0 to 3 are the four patterns, rows first; bit 4 j + i of the upper half is bit j of the i-th sign byte.
    """
    words = packed.reshape(n // 16, k // 64, 8, 4).transpose(1, 2).reshape(n // 2, k // 16)
    place = torch.arange(4, device=packed.device)
    patterns = words[..., None] >> 8 * place & 255
    bit = torch.arange(8, device=packed.device)
    signs = (words[..., None, None] >> 32 + 4 * bit + place[:, None] & 1) << bit
    codes = (patterns << 8 | signs.sum(-1)).reshape(n // 2, k // 16, 2, 2)  # row pair, vector pair, vector, row
    return codes.permute(0, 3, 1, 2).reshape(n, k // 8)


def _tensors(state: Mapping[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    if missing := [name for name in names if name not in state]:
        raise ValueError(f"state: has no {', '.join(missing)}; supported: the tensors {', '.join(names)}")
    return [state[name] for name in names]
