"""Tiny models with random weights of every family that LowBitCache serves, and how tests read text through them."""

import torch
import transformers

from lowbit_attn.integrations import hf

SMALL = dict(hidden_size=96, intermediate_size=64, num_attention_heads=6, num_key_value_heads=2, vocab_size=97,
             max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.15)
WINDOW = 48
WIDE = dict(hidden_size=384, initializer_range=0.06)  # heads of 64 channels where the family derives them
HYBRID = ["sliding_attention", "full_attention"]
FAMILIES = {  # class, what differs from SMALL, the window of its sliding layers
    "llama": ("LlamaForCausalLM", dict(num_hidden_layers=2, head_dim=64), None),
    "smollm3": ("SmolLM3ForCausalLM", dict(num_hidden_layers=4, no_rope_layer_interval=4, **WIDE), None),
    "qwen2": ("Qwen2ForCausalLM", dict(num_hidden_layers=2, **WIDE), None),
    "qwen2-sliding": ("Qwen2ForCausalLM", dict(num_hidden_layers=2, **WIDE, use_sliding_window=True,
                                               sliding_window=WINDOW, max_window_layers=1), WINDOW),
    "qwen3": ("Qwen3ForCausalLM", dict(num_hidden_layers=2, head_dim=128), None),
    "mistral": ("MistralForCausalLM", dict(num_hidden_layers=2, head_dim=64, sliding_window=None), None),
    "mistral-sliding": ("MistralForCausalLM", dict(num_hidden_layers=2, head_dim=64, sliding_window=WINDOW), WINDOW),
    "gemma2": ("Gemma2ForCausalLM", dict(num_hidden_layers=2, head_dim=256, sliding_window=WINDOW, layer_types=HYBRID,
                                         attn_logit_softcapping=2.0, query_pre_attn_scalar=64), WINDOW),
    "gemma3": ("Gemma3ForCausalLM", dict(num_hidden_layers=2, head_dim=256, sliding_window=WINDOW,
                                         layer_types=HYBRID), WINDOW),
    "gpt-oss": ("GptOssForCausalLM", dict(num_hidden_layers=2, head_dim=64, sliding_window=WINDOW, layer_types=HYBRID,
                                          num_local_experts=2, num_experts_per_tok=2), WINDOW),
}


def build(name: str, **options):
    """A model of FAMILIES in eval mode, fp32 on the CPU; options: what differs from its configuration there."""
    torch.manual_seed(1)
    cls = getattr(transformers, FAMILIES[name][0])
    model = cls(cls.config_class(**(SMALL | FAMILIES[name][1] | options))).eval()
    if name == "gpt-oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def tokens(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def eager(model, ids, mask=None):
    """Logits of one pass with the model's own attention, 16-bit rounding apart."""
    model.set_attn_implementation("eager")
    return model(ids, attention_mask=mask, **positions(mask)).logits


def positions(mask) -> dict:
    return {} if mask is None else dict(position_ids=(mask.cumsum(1) - 1).clamp(0))


@torch.no_grad()
def stepwise(model, cache, ids, sizes, mask=None):
    """Logits read through a LowBitCache in steps of these sizes."""
    model.set_attn_implementation(hf.NAME)
    out, start = [], 0
    for size in sizes:
        stop = start + size
        place = {name: x[:, start:stop] for name, x in positions(mask).items()}
        out.append(model(ids[:, start:stop], **{hf.CACHE_ARGUMENT: cache}, **place,
                         attention_mask=None if mask is None else mask[:, :stop]).logits)
        start = stop
    return torch.cat(out, 1)


def error(got, expected) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def save_with_letters(path, characters: str = " abcdefghijklmnopqrstuvwxyz"):
    """A random Llama with a tokenizer of single characters, saved in a folder; its path."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = {c: i for i, c in enumerate(["<unk>", "<eos>", "<pad>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>",
                                         unk_token="<unk>").save_pretrained(path)
    build("llama").save_pretrained(path)
    return path
