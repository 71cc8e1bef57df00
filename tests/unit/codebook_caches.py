"""Tokens, codebooks and caches of the codebook tests."""

from dataclasses import replace

import torch

from lowbit_attn import FORMATS, KVCache
from lowbit_attn.codebooks import LayerCodebooks
from lowbit_attn.formats import Kind
from lowbit_attn.testing import normal_codebooks

HEADS, DIM, SINKS = 2, 64, 32
FREQ = 10_000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
NAMES = ("cq4", "cq2", "cq1", "kcq4vcq2", "cq2-nonorm", "k4vcq2", "kcq2v4", "k4tvcq2-g32")


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as Llama's of [tokens, heads, head_dim], by complex numbers in fp64."""
    z = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * positions[:, None, None] * FREQ.double())
    return torch.cat((z.real, z.imag), -1)


def tokens(count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with strong and weak channels and means of their own, embedded at positions from ``start`` on; V."""
    spread = torch.linspace(3, 0.2, DIM // 2).repeat(2)
    k = torch.randn(count, HEADS, DIM) * spread + torch.randn(HEADS, DIM) * spread
    return rotated(k, torch.arange(start, start + count)).half(), torch.randn(count, HEADS, DIM).half()


def learned(name: str, rope: str, k: torch.Tensor, v: torch.Tensor) -> LayerCodebooks:
    """Codebooks whose entries are values of these very tokens, found with arithmetic that the package does not have."""
    sinks = SINKS
    books = normal_codebooks(name, 1, HEADS, DIM, rope).layer(0)
    fmt, changes = FORMATS[name], {}
    pages = (len(k) - sinks) // 128
    picked = torch.randperm(pages * 128)[:256]
    if books.k_entries is not None:
        x = k.double()
        x = rotated(x, -torch.arange(len(k))) if rope == "pre" else x
        x = torch.stack([(x[:, h] * books.k_weights[h])[:, books.k_order[h].long()] for h in range(HEADS)])
        x = x[:, sinks : sinks + 128 * pages].unflatten(1, (pages, 128))
        changes["k_entries"] = cut((x - x.mean(2, keepdim=True)).flatten(1, 2), fmt.k.vec_size, picked)
    if books.v_entries is not None:
        x = v.double().transpose(0, 1)[:, sinks : sinks + 128 * pages]
        x = x / x.square().mean(-1, keepdim=True).sqrt() if fmt.v.normed else x
        changes["v_entries"] = cut(x, fmt.v.vec_size, picked)
    return replace(books, **changes)


def cut(x: torch.Tensor, vec_size: int, picked: torch.Tensor) -> torch.Tensor:
    """Values [heads, tokens, head_dim] -> entries fp16 [heads, groups, 256, vec_size]."""
    return x[:, picked].unflatten(2, (-1, vec_size)).transpose(1, 2).half()


def books_of(name: str, rope: str = "post", seed: int = 0) -> LayerCodebooks:
    rope = rope if FORMATS[name].k.kind is Kind.CODEBOOK else "post"
    return normal_codebooks(name, 1, HEADS, DIM, rope, seed).layer(0)


def make(name: str = "cq2", rope: str = "post", books: LayerCodebooks | None = None, **options) -> KVCache:
    return KVCache(name, options.pop("num_pages", 12), HEADS, DIM, codebooks=books or books_of(name, rope), **options)


def of_model(cache: KVCache, k: torch.Tensor) -> torch.Tensor:
    """Stored keys [heads, tokens, head_dim] in the model's order and without weights."""
    books = cache.attached.layer
    if books.k_entries is None:
        return k
    return torch.stack([k[h][:, books.k_order[h].long().argsort()] / books.k_weights[h] for h in range(HEADS)])
