"""What goes through a model in the place of K and V."""

import torch

NAME = "lowbit"
SUPPORTED = ("models that take their attention from transformers' AttentionInterface (Llama, SmolLM, Qwen2/3, Mistral, "
             "Gemma 2/3, gpt-oss and others) in all their layers")
READ_ELSEWHERE = ("this model's attention reads K and V itself, and a LowBitCache gives them to the attention function "
                  f"{NAME!r} only: model.set_attn_implementation({NAME!r}) was not called, or the model has attention "
                  "in code of its own, on which the call has no effect (Falcon, MPT, BLOOM, Doge); supported: "
                  f"{SUPPORTED}")


class Handle:
    """Stands for K and V between ``LowBitCache.update`` and the attention function; not a tensor."""

    def __init__(self, layer, k: torch.Tensor, v: torch.Tensor):
        self.layer, self.k, self.v = layer, k, v

    def __getattr__(self, name: str):
        raise NotImplementedError(f"key.{name}: {READ_ELSEWHERE}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{getattr(func, '__name__', func)}: {READ_ELSEWHERE}")
