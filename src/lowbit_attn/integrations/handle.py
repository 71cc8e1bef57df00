"""What goes through a model in the place of K and V."""

import torch

NAME = "lowbit"


class Handle:
    """Stands for K and V between ``LowBitCache.update`` and the attention function; not a tensor."""

    def __init__(self, layer, k: torch.Tensor, v: torch.Tensor):
        self.layer, self.k, self.v = layer, k, v

    def __getattr__(self, name: str):
        raise NotImplementedError(f"key.{name}: K and V in a LowBitCache are read only by the attention function "
                                  f"{NAME!r}; call model.set_attn_implementation({NAME!r})")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{getattr(func, '__name__', func)}: K and V in a LowBitCache are read only by the "
                                  f"attention function {NAME!r}; call model.set_attn_implementation({NAME!r})")
