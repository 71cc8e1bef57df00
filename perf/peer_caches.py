"""Peers with quantized caches, and ours: transformers' QuantizedCache, KIVI's scheme in torch."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from peer_attention import first_line
from peer_case import Data, Shape, Step, Unavailable

RESIDUAL, GROUP = 128, 32  # KIVI's: recent tokens in 16 bit, tokens or channels of a group
HF_GROUP = 64  # transformers' default


# ---- transformers


def quantized_cache(backend: str, nbits: int) -> Callable[[Shape, Data], list[Step]]:
    """A step of attention as transformers does it: update dequantizes the whole layer, then SDPA reads it."""
    def steps(shape: Shape, data: Data) -> list[Step]:
        try:
            from transformers import LlamaConfig, QuantizedCache
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            config = LlamaConfig(num_hidden_layers=1, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
                                 num_key_value_heads=shape.num_heads_kv)
            cache = QuantizedCache(backend=backend, config=config, nbits=nbits, axis_key=0, axis_value=0,
                                   q_group_size=HF_GROUP, residual_length=RESIDUAL)
        except ImportError as error:
            raise Unavailable(first_line(error)) from error
        layer, module = cache.layers[0], SimpleNamespace(num_key_value_groups=shape.num_heads // shape.num_heads_kv,
                                                         is_causal=True, training=False)
        layer.update(data.k[:, :, :-1], data.v[:, :, :-1])
        new, state = (data.k[:, :, -1:], data.v[:, :, -1:]), dict(vars(layer))

        def read() -> tuple[torch.Tensor, torch.Tensor]:
            vars(layer).update(state)  # the next call adds the same token again
            return layer.update(*new)

        def call() -> torch.Tensor:
            k, v = read()
            return sdpa_attention_forward(module, data.q[:, :, None], k, v, None)[0][:, 0]

        k, v = read()
        nbytes = sum(map(_nbytes, (state["_quantized_keys"], state["_quantized_values"])))
        return [Step(call, k, v, nbytes, has_graph=False,
                     note=f"the quantization of all tokens, at every {RESIDUAL}th step, is not in the time")]
    return steps


def _nbytes(held) -> int:
    """Bytes of all tensors in a quantized tensor of quanto or in what HQQ gives."""
    if isinstance(held, tuple | list):
        return sum(map(_nbytes, held))
    if isinstance(held, dict):
        return sum(map(_nbytes, held.values()))
    if hasattr(held, "__tensor_flatten__"):
        return sum(_nbytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    return held.nbytes if isinstance(held, torch.Tensor) else 0


# ---- KIVI's scheme


def kivi_like(nbits: int) -> Callable[[Shape, Data], list[Step]]:
    """KIVI in plain torch: K by channel over 32 tokens, V by token over 32 channels, the last 128 in 16 bit."""
    def steps(shape: Shape, data: Data) -> list[Step]:
        packed = (shape.seqlen - RESIDUAL) // GROUP * GROUP
        if packed < GROUP or shape.head_dim % GROUP:
            raise Unavailable(f"seqlen {shape.seqlen}, head_dim {shape.head_dim}: supported are {RESIDUAL + GROUP} or "
                              f"more tokens, multiples of {GROUP} channels")
        k = _quantized(data.k[:, :, :packed].transpose(2, 3), nbits)
        v = _quantized(data.v[:, :, :packed], nbits)
        q = data.q.unflatten(1, (shape.num_heads_kv, -1))

        def held() -> tuple[torch.Tensor, torch.Tensor]:
            return (torch.cat((_dequantized(*k, nbits).transpose(2, 3), data.k[:, :, packed:]), 2),
                    torch.cat((_dequantized(*v, nbits), data.v[:, :, packed:]), 2))

        def call() -> torch.Tensor:
            keys, values = held()
            scores = (q @ keys.transpose(2, 3)).float() / shape.head_dim**0.5
            return (scores.softmax(-1).half() @ values).flatten(1, 2)

        tail = 2 * data.k[:, :, packed:].numel() * 2
        return [Step(call, *held(), sum(x.nbytes for x in (*k, *v)) + tail)]
    return steps


def _quantized(x: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of 32 neighbours of the last axis, 8 / nbits to a byte, and fp16 scales and minima of the groups."""
    groups = x.unflatten(-1, (-1, GROUP)).float()
    low = groups.amin(-1, keepdim=True).half()
    scale = ((groups.amax(-1, keepdim=True) - low) / (2**nbits - 1)).half().clamp_min(1e-6)
    codes = ((groups - low) / scale).round().clamp(0, 2**nbits - 1).to(torch.uint8)
    parts = codes.unflatten(-1, (-1, 8 // nbits))
    bytes_of = sum(parts[..., i] << (nbits * i) for i in range(8 // nbits))
    return bytes_of, scale, low


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, nbits: int) -> torch.Tensor:
    """fp16 values of ``_quantized``."""
    parts = torch.stack([(codes >> (nbits * i)) & (2**nbits - 1) for i in range(8 // nbits)], -1)
    return (parts.flatten(-2) * scale + low).flatten(-2)


# ---- ours


def lowbit(format: str) -> Callable[[Shape, Data], list[Step]]:
    """This package's decode over pages in permuted order, the last tokens in 16 bit."""
    def steps(shape: Shape, data: Data) -> list[Step]:
        from lowbit_attn import KVCache, decode
        from lowbit_attn.testing import permute_pages

        cache = KVCache(format, shape.batch * -(-shape.seqlen // 128), shape.num_heads_kv, shape.head_dim,
                        torch.float16, data.q.device, sinks=0, max_batch=shape.batch, max_seqlen=shape.seqlen)
        for row in range(shape.batch):
            cache.prefill(row, data.k[row].transpose(0, 1), data.v[row].transpose(0, 1))
        permute_pages(cache, seed=1)
        held = [cache.gather(row) for row in range(shape.batch)]
        k, v = (torch.stack([one[side].half() for one in held]) for side in range(2))
        exact = all(torch.equal(torch.stack([one[side] for one in held]), x.float()) for side, x in enumerate((k, v)))
        note = "" if exact else "its values rounded to 16 bit for the error"
        return [Step(lambda: decode(data.q[:, None], cache)[0][:, 0], k, v, cache.nbytes, note=note)]
    return steps
