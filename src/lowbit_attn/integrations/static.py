"""A layer of a LowBitCache whose decode steps need nothing of the host: one graph, compiled or captured, serves all.

All pages are there before the prompt. A step of one token after it is ``KVCache.append``, which first packs the block
that earlier steps filled, then ``lowbit_attn.decode``; both follow the counters on the device, and so does the length
that positions are made of. Prompts and chunks go through the host, as in every layer.
"""

from collections.abc import Sequence

import torch

from lowbit_attn import _private, ops
from lowbit_attn.integrations.handle import Handle
from lowbit_attn.integrations.layer import NOT_TRACED, LowBitLayer
from lowbit_attn.reference import PLAIN, Attention


class StaticLowBitLayer(LowBitLayer):
    """A LowBitLayer with max_seqlen given.

    ``is_started``: every row holds tokens, so that steps on the device may follow; ``length`` is from then on what the
    host knew last. ``model_window``: the window that the model asked for with the prompt; ``first_pad``: int32 [], row
    0's padding on the device.
    """

    is_compileable = True
    loads_ahead = True

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_started, self.model_window, self.first_pad = False, None, None

    def is_step(self, q_len: int) -> bool:
        return self.is_started and q_len == 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.kv is not None and (kind := self._kind(key_states)) != self.made_for:
            names = ("batch", "KV heads", "head_dim", "dtype", "device")
            other = [(name, got, made) for name, got, made in zip(names, kind, self.made_for) if got != made]
            raise ValueError(f"key_states: got {', '.join(f'{name} {got}' for name, got, _ in other)}, supported: "
                             f"{', '.join(str(made) for *_, made in other)}, for which this static cache has its "
                             "memory; make a new one")
        super().lazy_initialization(key_states, value_states)

    def attend(self, handle: Handle, query: torch.Tensor, options: Attention = PLAIN,
               pads: Sequence[int] | None = None) -> torch.Tensor:
        """LowBitLayer.attend; but a step of one token after the prompt has the prompt's padding, whatever pads says."""
        if not self.is_step(query.shape[2]):
            return self._attend_on_host(handle, query, options, pads)
        self._check_handle(handle, query)
        if options.window != self.model_window:
            raise NotImplementedError(f"sliding_window: got {options.window} after a prompt with {self.model_window}; "
                                      "supported: the same")
        options = self.windowed(options)
        if torch.compiler.is_compiling() or self.kv.is_capturing():
            out = self._step(handle, query, options)
        else:
            self.kv.settle("append")
            self._ready(query, options, load=True)
            with self._undone_on_error():
                out = self._step(handle, query, options)
        self.handle = None
        return out

    def _step(self, handle: Handle, query: torch.Tensor, options: Attention) -> torch.Tensor:
        k, v = self._entered(handle)
        self.kv.append(k.transpose(1, 2), v.transpose(1, 2))
        if self.kv.query_weights is not None:  # after append, which packs what was full before this step
            self._weigh(query, self.kv.n_tok.sum() - self.batch_size, (0,) * self.batch_size)
        out, _ = self._decode(query.transpose(1, 2), options)
        return out.to(query.dtype)

    def known_length(self) -> int | None:
        if not self.is_started:
            return self.length
        unseen = self.kv.is_capturing() or self.kv.is_captured
        return None if unseen else int(self.kv.counts.n_tok[0]) + self.pads[0]

    @torch.compiler.disable(reason=NOT_TRACED)
    def _attend_on_host(self, handle: Handle, query, options: Attention, pads) -> torch.Tensor:
        self._follow_device()
        out = super().attend(handle, query, options, pads)
        self.first_pad.fill_(self.pads[0])
        self.model_window, self.is_started = options.window, all(pad < self.length for pad in self.pads)
        return out

    @torch.compiler.disable(reason=NOT_TRACED)
    def _follow_device(self) -> None:
        """Bring the host up to date with steps that it did not see, as if each had been flushed."""
        if not self.is_started:
            return
        if self.kv.is_capturing():
            raise NotImplementedError(NOT_TRACED)
        self.kv.flush()
        self.length = int(self.kv.counts.n_tok[0]) + self.pads[0]

    def _make_room(self, k: torch.Tensor, tokens: int) -> None:
        super()._make_room(k, tokens)
        if self.first_pad is None:
            self._reserve()
            with torch.inference_mode(False):
                self.first_pad = torch.zeros((), dtype=torch.int32, device=self.device)
            ops.mark_static(self.kv)
            for x in (self.first_pad, self.kv.query_weights):
                if x is not None:
                    _private.mark_static_address(x)

    def _reserve(self) -> None:
        self.kv.reserve(range(self.batch_size), self.kv.max_seqlen)

    def _attend_tail(self, query, handle: Handle, options: Attention, pads) -> torch.Tensor:
        raise NotImplementedError(f"sliding: got '16bit' for a layer with a window of {options.window} in a static "
                                  "cache; supported: LowBitCache(..., sliding='lowbit')")

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens of every row so far; int32 [] on the device once steps there may follow."""
        return self.kv.n_tok[0] + self.first_pad if self.is_started else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_step(query_length):
            return self.max_seqlen, 0
        self._follow_device()
        return super().get_mask_sizes(query_length)

    def reset(self) -> None:
        """Forget all tokens, and marks of steps without room; memory stays where it is and all pages stay taken."""
        if self.kv is not None:
            self.kv.faults.zero_()
        super().reset()
        self.is_started = False

    def _forget(self) -> None:
        super()._forget()
        self._reserve()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self._follow_device()
        super().crop(tokens_to_remove)
