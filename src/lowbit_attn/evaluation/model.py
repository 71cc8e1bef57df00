"""lm-eval's model type ``lowbit``: a transformers model whose prompts are read in chunks over a low-bit cache.

    import lm_eval
    import lowbit_attn.evaluation.model  # registers the type

    lm_eval.simple_evaluate(model="lowbit", model_args="pretrained=FOLDER,format=k2v2,sinks=32", tasks=[...])

Read in one forward call, as other model types do, a task of log-likelihoods never touches a quantized cache. In chunks
it does where prompts are longer than sinks and two chunks; ``attended`` has the share of predicted tokens that did.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers.cache_utils import Cache

from lowbit_attn import loading, tokenizing
from lowbit_attn.checks import integer, is_truth
from lowbit_attn.demo import model as models
from lowbit_attn.demo.model import DEMO
from lowbit_attn.evaluation import REMEDY
from lowbit_attn.evaluation.reading import Attended, Reader, Wanted
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.quality import new_cache, restored_attention

try:
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(f"lm-eval is not installed ({error}): {REMEDY}") from error

log = logging.getLogger("lowbit_attn")

MOST_NEW = 256  # tokens that a task without max_gen_toks gets
GREEDY = {"do_sample": (False,), "temperature": (0, 0.0, 1.0, None), "num_beams": (1,)}  # what greedy search allows
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")


@register_model("lowbit")
class LowBitLM(TemplateLM):
    """A causal language model over one kind of cache, one request at a time.

    Args:
        pretrained: a folder of a transformers model, "demo" (SmolLM2-135M-Instruct, fetched), or a model.
        tokenizer: beside a model; else the folder's own.
        format: of LowBitCache; "16": 16 bit. sinks, range_search, codebooks, path, sliding: as LowBitCache takes them.
        chunk: tokens of a forward call that reads a prompt; 0: the whole prompt at once, over no quantized token.
        device: "cuda" or "cpu"; None: a GPU if there is one. dtype: a name in torch; None: that of the model.
        max_length: tokens of a prompt with its answer; None: the model's. Longer prompts lose their first tokens, with
            a warning. batch_size, max_batch_size: lm-eval's; 1 alone is supported.
    """

    def __init__(self, pretrained=DEMO, format: str | int = "k4v4", *, tokenizer=None, sinks: int | None = None,
                 range_search: bool | None = None, codebooks: str | None = None, path: str | None = None,
                 sliding: str = "16bit", chunk: int = PAGE_TOKENS, device: str | None = None, dtype: str | None = None,
                 max_length: int | None = None, batch_size: int | str = 1, max_batch_size: int | None = None):
        super().__init__()
        if str(batch_size) not in ("1", "auto") or max_batch_size not in (None, 1):
            raise ValueError(f"batch_size: got {batch_size} (at most {max_batch_size}), supported: 1")
        if integer("chunk", chunk) < 0:
            raise ValueError(f"chunk: got {chunk}, supported: 0 (a whole prompt at once) or more tokens")
        if range_search is not None:
            is_truth("range_search", range_search)
        options = dict(format=str(format), sinks=sinks, range_search=range_search, path=path, sliding=sliding)
        self.options = None if str(format) == "16" else options | ({"codebooks": codebooks} if codebooks else {})
        new_cache(self.options)  # what is wrong with the options is told before a model is loaded
        self.model, self.tokenizer = _loaded(pretrained, tokenizer, device, dtype)
        config = self.model.config.get_text_config()
        self.max_length = max_length or getattr(config, "max_position_embeddings", None) or 2048
        self.reader = Reader(self.model, self.options, chunk or self.max_length)
        self._device = self.model.device

    @property
    def attended(self) -> Attended:
        """Predicted tokens so far, and how many of them saw packed pages."""
        return self.reader.attended

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Tokens of a text; None: with the special tokens that the tokenizer puts in front, unless the text begins with
        them."""
        if add_special_tokens is None:
            return tokenizing.encode(self.tokenizer, string)
        return self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False,
                                                  add_generation_prompt=add_generation_prompt,
                                                  continue_final_message=not add_generation_prompt)

    # ---- requests

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether greedy search would write it) of each (texts, context, continuation)."""
        wanted = [Wanted(self._last((context + continuation)[:-1], 0), len(continuation))
                  for _, context, continuation in requests]
        if longest := next((one for one in wanted if one.keep > len(one.ids)), None):
            raise ValueError(f"continuation: got {longest.keep} tokens, supported: at most max_length, "
                             f"{self.max_length}")
        answers = []
        for (logits, _), (texts, _, continuation) in zip(self._read(wanted), requests):
            target = torch.tensor(continuation, device=logits.device)
            found = logits.log_softmax(-1).gather(1, target[:, None]).sum().item()
            answers.append((found, bool((logits.argmax(-1) == target).all())))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, in disjoint windows of max_length tokens."""
        answers = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(self.tok_encode(text, add_special_tokens=False),
                                                      self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *utils.make_disjoint_window(pair)) for pair in windows]
            answers.append(sum(found for found, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop text, the end of the text, or max_gen_toks tokens."""
        asked = [(context, _stops(options), _most_new(options)) for context, options in (r.args for r in requests)]
        wanted = [Wanted(self._last(self.tok_encode(context), most)) for context, _, most in asked]
        answers = []
        for (logits, cache), (_, stops, most), request in zip(self._read(wanted), asked, requests):
            answers.append(self._written(logits, cache, stops, most))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _read(self, wanted: list[Wanted]) -> Iterator[tuple[torch.Tensor, Cache]]:
        """Logits and cache of each; afterwards the model attends as it did before."""
        with restored_attention(self.model):
            for one, following in zip(wanted, [*wanted[1:], None]):
                yield self.reader.read(one, following)

    def _written(self, logits: torch.Tensor, cache: Cache, stops: list[str], most: int) -> str:
        """What greedy search writes behind a prompt that a cache holds, without the stop text."""
        ends, new, text = _ends(self), [], ""
        while len(new) < most:
            token = logits[-1].argmax().item()
            if token in ends:
                break
            new.append(token)
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            if found := [text.index(stop) for stop in stops if stop in text]:
                return text[: min(found)]
            if len(new) < most:
                logits = self.reader.step(cache, [token])
        return text

    def _last(self, ids: list[int], new: int) -> list[int]:
        """The tokens of a prompt that leave room for ``new`` more."""
        most = self.max_length - new
        if most < 1:
            raise ValueError(f"max_gen_toks: got {new}, supported: fewer than max_length, {self.max_length}")
        if len(ids) > most:
            log.warning("prompt: %d tokens, of which the last %d are read: max_length is %d", len(ids), most,
                        self.max_length)
        return ids[-most:]


def _loaded(pretrained, tokenizer, device: str | None, dtype: str | None) -> tuple:
    """(model, tokenizer) of a folder or the demo; a model and its tokenizer as they are."""
    if not isinstance(pretrained, str | Path):
        if tokenizer is None:
            raise ValueError("tokenizer: got none beside a model, supported: the model's")
        return pretrained.eval(), tokenizer
    if tokenizer is not None:
        raise ValueError("tokenizer: got one beside a folder, supported: None, for a folder has its own")
    device = device or loading.pick_device()
    kind = None if dtype in (None, "auto") else getattr(torch, dtype)
    if str(pretrained) == DEMO:
        return models.load(models.fetch(models.default_folder()), device, kind)
    if not (Path(pretrained) / "config.json").exists():
        raise ValueError(f"pretrained: got {str(pretrained)!r}, supported: {DEMO!r}, or a folder with a config.json")
    return loading.load_folder(Path(pretrained), device, kind)


def _stops(options: dict) -> list[str]:
    """Texts that end an answer; ValueError for options of a search that is not greedy."""
    for name, value in options.items():
        if name in GREEDY and value not in GREEDY[name]:
            raise ValueError(f"{name}: got {value}, supported: greedy search, {name}={GREEDY[name][0]}")
        if name not in (*GREEDY, *LENGTHS, "until", "top_p", "top_k"):  # the last two say nothing to a greedy search
            raise ValueError(f"gen_kwargs: got {name}={value!r}, supported: {', '.join((*GREEDY, *LENGTHS))}, until")
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]


def _most_new(options: dict) -> int:
    return next((int(options[name]) for name in LENGTHS if name in options), MOST_NEW)


def _ends(lm: LowBitLM) -> set[int]:
    """Tokens with which a model ends a text."""
    own = getattr(lm.model.generation_config, "eos_token_id", None)
    return {lm.eot_token_id, *(own if isinstance(own, Iterable) else () if own is None else (own,))}
