"""One layer of a transformers cache whose K and V are a KVCache, or the 16-bit tail of a sliding window.

A step's new queries attend to the cache as it is before the step (packed pages, sinks and the open block) by
``lowbit_attn.decode`` and to the step's own tokens in 16 bit, causally; the two results are merged by their lse. Then
the tokens enter the cache and full blocks are packed. No step dequantizes the cache, but one: several new
tokens over low-bit pages under a sliding window.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from lowbit_attn.api import decode, merge_states, ready
from lowbit_attn.cache.state import DTYPES, is_capturing
from lowbit_attn.codebooks import Codebooks, LayerCodebooks
from lowbit_attn.codebooks.file import CodebookFileError
from lowbit_attn.codebooks.identity import config_hash
from lowbit_attn.formats import Format
from lowbit_attn.integrations import dense
from lowbit_attn.integrations.base import BaseLayer
from lowbit_attn.integrations.drafts import Drafts, Step
from lowbit_attn.integrations.growth import grown, new_cache
from lowbit_attn.integrations.handle import Handle
from lowbit_attn.plan import plans_of
from lowbit_attn.precision import on_own_defaults
from lowbit_attn.reference import PLAIN, Attention

NOT_TRACED = ("LowBitCache: supported in one graph, compiled or captured: steps of one token a row over "
              "LowBitCache(..., max_seqlen=, static=True), after the prompt")
START_ANEW = "reset() the cache and give the whole text again"
FIRST_TOKENS = 1024  # room of a cache of unknown final length; doubled whenever it is full


class LowBitLayer(BaseLayer):
    """One layer; what holds it is made at its first step, from the shapes and the window that the step brings.

    ``kv``: the KVCache, None in a 16-bit sliding layer; ``tail``: (K, V) [batch, num_heads_kv, < window, head_dim] of
    such a layer. ``length``: tokens of every row so far, the first ``pads[b]`` of them padding, which is not stored.
    Options: see LowBitCache; ``sinks`` None: the format's own, as in KVCache.
    """

    loads_ahead = False  # whether the prompt loads the kernel of steps, which then nothing on the host can refuse

    def __init__(self, format: Format, *, max_seqlen: int | None = None, dtype: torch.dtype | None = None,
                 path: str | None = None, sliding: str = "16bit", window: int | None = None, keep_sinks: bool = False,
                 sinks: int | None = None, codebooks: Codebooks | None = None, **options):
        super().__init__()
        self.format, self.max_seqlen, self.kv_dtype, self.path = format, max_seqlen, dtype, path
        self.sliding, self.window, self.keep_sinks, self.options = sliding, window, keep_sinks, options
        self.sinks = format.sinks if sinks is None else sinks
        self.max_drafts = options.get("max_q_len", 1) - 1
        self.kv = self.tail = self.handle = None
        self.pads = ()
        self.codebooks, self.index, self.made_for = codebooks, None, None
        self.position_ids = None  # of the step's tokens, where the model says them
        self.is_first = False  # whether no layer of the cache holds tokens yet, so that this one looks at the model
        self.drafted, self.is_recording = 0, False  # drafts in the next step; whether the cache takes drafts back
        self.drafts: Drafts | None = None  # those of the last step

    def __repr__(self) -> str:
        kind = "16-bit window" if self.tail is not None else self.format
        return f"{type(self).__name__}({kind}, {int(self.get_seq_length())} tokens)"

    def _kind(self, key_states: torch.Tensor) -> tuple:
        """What the layer's memory depends on: batch, KV heads, head_dim, the dtype it stores, the device."""
        batch, heads, _, head_dim = key_states.shape
        stored = self.kv_dtype or (key_states.dtype if key_states.dtype in DTYPES else torch.float16)
        return batch, heads, head_dim, stored, key_states.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take over shape, dtype and device of key_states [batch, num_heads_kv, tokens, head_dim], and drop memory that
        was made for others."""
        kind = self._kind(key_states)
        if kind != self.made_for:
            self.kv = None
        self.batch_size, _, _, self.dtype, self.device = self.made_for = kind
        self.pads, self.tail = (0,) * self.batch_size, None
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        """Bring a step's K and V [batch, num_heads_kv, tokens, head_dim]; they are stored by ``attend``."""
        if key_states.shape != value_states.shape:
            raise NotImplementedError(f"value_states: got {list(value_states.shape)} beside keys of "
                                      f"{list(key_states.shape)}; supported: K and V of one shape")
        # in this order: a compiled step must not be bound to a length
        if not self.is_initialized or (self.made_for != self._kind(key_states) and self.length == 0):
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise ValueError(f"key_states: got batch {key_states.shape[0]}, supported: {self.batch_size}, the batch "
                             "that this cache holds; reset() it or make a new one")
        self.handle = Handle(self, key_states.detach(), value_states.detach())
        return self.handle, self.handle

    def check_model(self, config) -> None:
        """Raise, while the layer is empty, CodebookFileError for a model whose configuration is another than that of
        its codebooks, ValueError for one with other layers."""
        if self.length:
            return
        about = self.codebooks.metadata
        if about.get("config_hash") not in (None, config_hash(config)):
            raise CodebookFileError(f"codebooks: learned from {about.get('model', 'a model')}, whose configuration is "
                                    f"not that of this {config.model_type} model; supported: models of the same "
                                    "configuration; make others with lowbit-attn calibrate --model")
        if config.num_hidden_layers != self.codebooks.layers:
            raise ValueError(f"codebooks: made for {self.codebooks.layers} layers, and the model has "
                             f"{config.num_hidden_layers}, supported: codebooks of this model")

    @torch.compiler.disable(reason=NOT_TRACED)
    def attend(self, handle: Handle, query: torch.Tensor, options: Attention = PLAIN,
               pads: Sequence[int] | None = None) -> torch.Tensor:
        """Attention of query [batch, num_heads, q_len, head_dim] over the cache and the handle's tokens.

        A step of one token a row is done, or the layer is as it was before, whatever raises. So is a longer one that is
        refused or does not fit; where storing several tokens itself breaks off, ``check_whole`` finds it.

        pads: of each row, how many of all tokens so far (these included) are padding, all of it at the start; None:
        none. Returns [batch, q_len, num_heads, head_dim] in the query's dtype, without meaning where the query is
        padding; afterwards the tokens are stored.
        """
        if is_capturing(query.device):
            raise NotImplementedError(NOT_TRACED)
        q_len = self._check_handle(handle, query)
        pads = self._check_pads(pads, q_len)
        self._check_room(max(self.length + q_len - pad for pad in pads))
        self.check_whole()
        step, drafted = Step(handle.k, handle.v, query, options, pads, self.position_ids), min(self.drafted, q_len)
        self.drafts, self.drafted, out = None, 0, []
        if drafted < q_len:
            out.append(self.attend_step(step.part(0, q_len - drafted)))
        if drafted:
            self.drafts = Drafts(self, step.part(q_len - drafted, q_len))
            out.append(self.drafts.store(self))
        self.handle = None
        return torch.cat(out, 1)

    def attend_step(self, step: Step) -> torch.Tensor:
        """Attention of a step, or of a part of one, whose tokens are stored afterwards."""
        self.position_ids = step.position_ids
        pads = tuple(min(pad, self.length + len(step)) for pad in step.pads)
        if self.tail is not None or (step.options.window is not None and self.sliding == "16bit"
                                     and (self.kv is None or self.length == 0)):
            out = self._attend_tail(step.query, step, step.options, pads)
        else:
            out = self._attend_pages(step.query, step, self.windowed(step.options), pads)
        self.length += len(step)
        self.pads = pads
        return out

    def is_step(self, q_len: int) -> bool:
        """Whether a step of so many tokens is done on the device alone."""
        return False

    def _check_handle(self, handle: Handle, query: torch.Tensor) -> int:
        """The query's tokens, which are those of the handle of this step."""
        if handle is not self.handle:
            raise NotImplementedError("key: these tokens are already stored; a step's K and V can be attended to "
                                      "once (models whose layers share K and V are not supported)")
        if handle.k.shape[2] != query.shape[2]:
            raise NotImplementedError(f"query: {query.shape[2]} tokens beside {handle.k.shape[2]} new keys; "
                                      "supported: equal counts")
        return query.shape[2]

    def _check_room(self, tokens: int) -> None:
        """Every layer, 16-bit windows too, refuses what one would refuse: a forward call ends in the first."""
        if self.max_seqlen is not None and tokens > self.max_seqlen:
            raise ValueError(f"max_seqlen: the sequences would reach {tokens} tokens, supported: {self.max_seqlen} "
                             "as given to LowBitCache; None lets the cache grow")

    def known_length(self) -> int | None:
        """Tokens of every row so far, padding included; None where only the device knows."""
        return self.length

    def check_whole(self) -> None:
        """Raise RuntimeError if the pages do not hold the layer's tokens: storing them was broken off before."""
        length = self.known_length()
        if self.kv is None or length is None:
            return
        held, wanted = self.kv.counts.n_tok.tolist(), [length - pad for pad in self.pads]
        if held != wanted:
            raise RuntimeError(f"{type(self).__name__}: the pages hold {held} tokens of {wanted}, since an earlier "
                               f"call ended while it stored them; {START_ANEW}")

    def windowed(self, options: Attention) -> Attention:
        """The model's options, with the cache's own window where the model has none."""
        if options.window is not None or self.window is None:
            return options
        return Attention(options.softmax_scale, options.softcap, self.window, self.keep_sinks, options.sink_logits)

    def _check_pads(self, pads: Sequence[int] | None, q_len: int) -> tuple[int, ...]:
        pads = (0,) * self.batch_size if pads is None else tuple(pads)
        if len(pads) != self.batch_size or tuple(min(pad, self.length) for pad in pads) != self.pads:
            raise NotImplementedError(f"attention_mask: padding of {list(pads)} tokens a row beside {list(self.pads)} "
                                      f"in the {self.length} tokens of the cache; supported: the mask of all tokens "
                                      "so far, padded as in the steps before")
        return pads

    def _entered(self, handle: Handle) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's K and V as the layer will hold them in 16 bit; saturated to what its pages, if any, can hold."""
        k, v = handle.k.to(self.dtype), handle.v.to(self.dtype)
        if not self.options.get("saturate"):
            return k, v
        most_k, most_v = (torch.finfo(self.dtype).max,) * 2 if self.kv is None else self.kv.largest
        return k.clamp(-most_k, most_k), v.clamp(-most_v, most_v)

    # ---- low-bit pages

    def _attend_pages(self, query, handle: Handle, options: Attention, pads) -> torch.Tensor:
        q_len = query.shape[2]
        held = [self.length - pad for pad in self.pads]  # tokens of each row before the step
        skips = [new - old for new, old in zip(pads, self.pads)]  # padding among the step's tokens
        self._make_room(handle.k, max(self.length + q_len - pad for pad in pads))
        k, v = self._entered(handle)
        is_step = q_len == 1 and all(held) and not any(skips)
        self._ready(query, options, load=is_step or self.loads_ahead)
        with self._undone_on_error():
            if self.kv.query_weights is not None:
                self._weigh(query, sum(held), skips)
            if is_step:
                self.kv.append(k.transpose(1, 2), v.transpose(1, 2))
                out, lse = self._decode(query.transpose(1, 2), options)
                if self.format.orders_tokens:
                    self._manage(self._decodable(query.transpose(1, 2)), lse, options)
                self._pack()
                return out.to(query.dtype)
            return self._attend_several(query, k, v, options, held, skips)

    def _attend_several(self, query, k, v, options: Attention, held, skips) -> torch.Tensor:
        """Several new tokens a row, or padding among them, or first tokens."""
        q_len, lse = query.shape[2], None
        if not any(held):
            out = dense.attend(query, k.to(query.dtype), v.to(query.dtype), options, skips, self.sinks)
        elif options.window is None:
            out, lse = self._merged(query, k, v, options, skips)
        else:
            out = self._gathered(query, k, v, options, skips)
        for row, skip in enumerate(skips):
            if skip < q_len:
                if not held[row] and self.kv.attached is not None and self.kv.attached.is_pre_rope:
                    self.kv.set_first_positions([row], self._position(row, skip))
                scored = self._queries_of(query, lse, options, row, skip) if self.format.orders_tokens else {}
                self.kv.prefill(row, k[row, :, skip:].transpose(0, 1), v[row, :, skip:].transpose(0, 1), **scored)
        return out

    def _position(self, row: int, skip: int) -> int:
        """Where the rotary embedding of the model has token ``skip`` of the step, the first of a row."""
        ids = self.position_ids
        if ids is not None:
            return int(ids[row if len(ids) > 1 else 0, skip])
        if skip:
            raise NotImplementedError("position_ids: this model does not give them to its attention function, and keys "
                                      "before their rotary embedding (codebooks of rope='pre') need them beside "
                                      "padding on the left; supported: codebooks of rope='post', or rows of one "
                                      "length")
        return 0

    def _pack(self) -> None:
        """Pack what a step made due."""
        self.kv.flush()

    def _queries_of(self, query, lse: torch.Tensor | None, options: Attention, row: int, skip: int) -> dict:
        """The queries of a row's new tokens, and their lse where it is known, as ``KVCache.prefill`` takes them."""
        q = self._decodable(query[row, :, skip:].transpose(0, 1))
        lse = None if lse is None else lse[row, :, skip:].contiguous()
        return dict(q=q, lse=lse, **self._scored(options), sink_logits=options.sink_logits)

    def _manage(self, query: torch.Tensor, lse: torch.Tensor, options: Attention) -> None:
        """Have the tokens scored by the queries just decoded."""
        self.kv.manage(query, lse, **self._scored(options))

    @staticmethod
    def _scored(options: Attention) -> dict:
        """What of an attention the scores of tokens depend on."""
        return dict(softmax_scale=options.softmax_scale, softcap=options.softcap, window=options.window)

    def _ready(self, query: torch.Tensor, options: Attention, load: bool) -> None:
        """Raise what decode of a step of one token would raise, before anything is stored; load: its kernel too."""
        query = self._decodable(query[:, :, -1:].transpose(1, 2))
        ready(query, self.kv, **self._asked(options), load=load)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Whatever raises within: first tokens are forgotten, and newest ones taken back that no page holds yet."""
        kv, weights = self.kv, self.kv.query_weights
        before, n_tok = None if weights is None else weights.clone(), kv.counts.n_tok.copy()
        n_qk, scores = kv.counts.n_qk.copy(), [(x, x.clone()) for x in (kv.score, kv.seen, kv.order) if x is not None]
        try:
            yield
        except BaseException:
            if before is not None:
                weights.copy_(before)
            added, open_tokens = kv.counts.n_tok - n_tok, kv.counts.n_tok - kv.counts.n_sink - kv.counts.n_qk
            if not n_tok.any():
                self._forget()
            elif added.any() and ((added <= open_tokens) | (kv.counts.n_qk == 0)).all():
                kv.rewind(range(self.batch_size), added)
            if (kv.counts.n_qk == n_qk).all():
                for x, old in scores:
                    x.copy_(old)
            raise

    def _forget(self) -> None:
        self.kv.clear(range(self.batch_size))

    def _weigh(self, query: torch.Tensor, seen: int | torch.Tensor, skips: Sequence[int]) -> None:
        """Fold a step's queries into the mean |q| that weighs channels of K; seen: tokens that are in it already."""
        weights = self.kv.query_weights
        query = query.detach()
        rows = torch.cat([query[row, :, skip:] for row, skip in enumerate(skips)], 1).float()  # [heads, tokens, D]
        if rows.shape[1]:
            mean = rows.abs().unflatten(0, (weights.shape[0], -1)).mean((1, 2))
            weights += (mean - weights) * (rows.shape[1] / (seen + rows.shape[1]))

    def _merged(self, query, k, v, options: Attention, skips) -> tuple[torch.Tensor, torch.Tensor]:
        """A step over cached tokens, all of which every new query sees: decode over them, merged with the step's own.

        Returns o [batch, q_len, num_heads, head_dim] and lse [batch, num_heads, q_len], sink logits included. The
        queries go to decode as heads of one token, since none of them is hidden from any cached token.
        """
        batch, num_heads, _, head_dim = query.shape
        plain = replace(options, sink_logits=None)
        past, past_lse = [], []
        for block in query.split(dense.QUERY_BLOCK, 2):
            folded = block.reshape(batch, 1, -1, head_dim)
            o, lse = self._decode(folded, plain)
            past.append(o.view(batch, num_heads, -1, head_dim).transpose(1, 2).float())
            past_lse.append(lse.view(batch, num_heads, -1))
        self._drop_plans()  # they keep scratch for this many queries, layer by layer
        own, own_lse = dense.with_lse(query, k, v, plain, skips)
        out, lse = merge_states(torch.stack((torch.cat(past, 1), own)), torch.stack((torch.cat(past_lse, 2), own_lse)))
        if options.sink_logits is not None:
            out *= torch.sigmoid(lse - options.sink_logits[:, None]).transpose(1, 2)[..., None]
            lse = torch.logaddexp(lse, options.sink_logits[:, None])
        return out.to(query.dtype), lse

    def _drop_plans(self) -> None:
        plans_of(self.kv).clear()

    def _decode(self, query: torch.Tensor, options: Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse) of query [batch, 1, heads, head_dim] over the cache."""
        return decode(self._decodable(query), self.kv, **self._asked(options))

    def _decodable(self, query: torch.Tensor) -> torch.Tensor:
        return query if query.dtype in (self.dtype, torch.float32) else query.to(self.dtype)

    def _asked(self, options: Attention) -> dict:
        return dict(softmax_scale=options.softmax_scale, softcap=options.softcap, window=options.window,
                    keep_sinks=options.keep_sinks, sink_logits=options.sink_logits, path=self.path)

    def _gathered(self, query, k, v, options: Attention, skips) -> torch.Tensor:
        """A step over low-bit pages under a window: each query sees other cached tokens, so they are dequantized."""
        out = torch.zeros_like(query).transpose(1, 2)
        for row, skip in enumerate(skips):
            if skip == query.shape[2]:
                continue
            past_k, past_v = self.kv.gather(row)
            q, new_k = query[row, :, skip:], k[row, :, skip:]
            if self.options.get("rotate_keys"):
                q, new_k = self.kv.rotate(q), self.kv.rotate(new_k)
            if self.kv.attached is not None:
                new_k = self.kv.attached.keys(new_k.transpose(0, 1), self.dtype).transpose(0, 1)
                q = self.kv.queries(q.transpose(0, 1)).transpose(0, 1)
            all_k, all_v = torch.cat((past_k, new_k.float()), 1), torch.cat((past_v, v[row, :, skip:].float()), 1)
            out[row, skip:] = dense.with_lse(q[None], all_k[None], all_v[None], options, (0,), self.sinks)[0][0]
        return out

    def _make_room(self, k: torch.Tensor, tokens: int) -> None:
        if self.kv is None:
            room = max(FIRST_TOKENS, tokens) if self.max_seqlen is None else self.max_seqlen
            shape, weights = (k.shape[1], k.shape[3]), None
            if self.format.k.weighs_queries:
                with torch.inference_mode(False):  # as in new_cache
                    weights = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self.kv = new_cache(self.format, room, self.batch_size, *shape, self.dtype, self.device,
                                exact=self.max_seqlen is not None, sinks=self.sinks, **self.options,
                                query_weights=weights, codebooks=self._books())
        self._grow(tokens)

    def _books(self) -> LayerCodebooks | None:
        """The codebooks of this layer, if its format needs some."""
        return None if self.codebooks is None else self.codebooks.layer(self.index)

    def grow_for(self, new: int) -> None:
        """Make room for so many more tokens, as a step that brings them would."""
        if self.kv is not None and self.max_seqlen is None:
            self._grow(max(self.length + new - pad for pad in self.pads))

    def _grow(self, tokens: int) -> None:
        if tokens > self.kv.max_seqlen:
            self.kv = grown(self.kv, max(tokens, 2 * self.kv.max_seqlen))

    # ---- the 16-bit tail of a sliding window

    @on_own_defaults
    def _attend_tail(self, query, handle: Handle, options: Attention, pads) -> torch.Tensor:
        k, v = self._entered(handle)
        if self.tail is not None:
            k, v = (torch.cat((old, new), 2) for old, new in zip(self.tail, (k, v)))
        shift = self.length + query.shape[2] - k.shape[2]  # tokens that left the window
        out = dense.attend(query, k.to(query.dtype), v.to(query.dtype), options,
                           [max(0, pad - shift) for pad in pads])
        # beside the window - 1 tokens that the next query sees, those that a crop would bring back into its window
        spare = self.max_drafts if self.drafts is None else max(self.max_drafts, query.shape[2])
        kept = slice(max(0, k.shape[2] - options.window + 1 - spare), None)
        with torch.inference_mode(False):  # else steps outside inference mode that record gradients could not read it
            self.tail = k[:, :, kept].clone(), v[:, :, kept].clone()
        self.kv = None  # of a model before this one
        return out

    # ---- what transformers asks of a layer

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens."""
        if self.tail is not None:
            return sum(x.nbytes for x in self.tail)
        return self.kv.nbytes if self.kv is not None else 0

    def reset(self) -> None:
        """Forget all tokens; the memory of pages stays allocated."""
        if self.kv is not None:
            self._forget()
        self.tail, self.length, self.handle, self.pads = None, 0, None, (0,) * len(self.pads)
        self.drafts, self.position_ids, self.is_initialized = None, None, False

    @property
    def is_croppable(self) -> bool:
        return self.max_drafts > 0 or self.is_recording

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens: those of the last step if it was of drafts, else max_q_len - 1 at
        most."""
        drop = -int(tokens_to_remove)  # a tensor, of transformers before 5.20
        if drop == 0 or self.length == 0:
            return
        held = min(self.length - pad for pad in self.pads)
        if self.drafts is not None and 0 < drop <= min(len(self.drafts), held):
            self.drafts.take_back(self, drop)
            return
        if not 0 < drop <= min(self.max_drafts, held):
            raise NotImplementedError(f"crop: got {tokens_to_remove} with max_q_len = {self.max_drafts + 1} and {held} "
                                      "tokens, supported: negative numbers of tokens, max_q_len - 1 at most (give "
                                      "LowBitCache a max_q_len of 2 to 16), for packed blocks cannot be taken apart")
        if self.tail is not None:
            self.tail = tuple(x[:, :, :-drop] for x in self.tail)
        else:
            self.kv.rewind(range(self.batch_size), drop)
        self.length -= drop
        self.drafts = None
