"""The part of transformers' interface of a cache layer that needs nothing of what the layer holds."""

import torch
from transformers.cache_utils import CacheLayerMixin


class BaseLayer(CacheLayerMixin):
    """A layer of ``length`` tokens, at most ``max_seqlen``, whose sequences are neither copied, reordered nor moved."""

    is_sliding = False  # the window is applied by ``attend``, so masks always count from the first token
    is_compileable = False
    supports_early_init = False
    length, max_seqlen = 0, None

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_seqlen is None else self.max_seqlen

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse("reorder_cache", "beam search copies sequences, and pages are not shared between them")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave", "pages are not shared between sequences; repeat the inputs instead")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("batch_select_indices", "all sequences of the batch stay in the cache")

    def offload(self) -> None:
        self._refuse("offload", "the pages stay on the model's device")

    def prefetch(self) -> None:
        self._refuse("prefetch", "the pages stay on the model's device")

    def _refuse(self, call: str, reason: str) -> None:
        raise NotImplementedError(f"{call}: LowBitCache does not support it: {reason}")
