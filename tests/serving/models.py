"""Folders of models for the engine: a tiny one with random weights, and the demo's, with real ones."""

import json
from pathlib import Path

import platformdirs
import torch

SMOLLM2 = Path(platformdirs.user_cache_dir("lowbit_attn")) / "smollm2"
TINY = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=128, intermediate_size=128,
            num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=64, vocab_size=512,
            max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="silu", bos_token_id=0, eos_token_id=1,
            tie_word_embeddings=False, attention_bias=False, mlp_bias=False, torch_dtype="float32",
            rope_parameters=dict(rope_theta=10000.0, rope_type="default"))


def tiny(folder: Path, **changes) -> Path:
    """A two-layer Llama, whose weights make attention matter and its next tokens far from even."""
    from safetensors.torch import save_file

    config = TINY | changes
    draw = torch.Generator().manual_seed(3)
    width, heads, heads_kv, dim = (config[name] for name in ("hidden_size", "num_attention_heads",
                                                             "num_key_value_heads", "head_dim"))
    shapes = {"model.embed_tokens": (config["vocab_size"], width), "lm_head": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (("self_attn.q_proj", (heads * dim, width)), ("self_attn.k_proj", (heads_kv * dim, width)),
                            ("self_attn.v_proj", (heads_kv * dim, width)), ("self_attn.o_proj", (width, heads * dim)),
                            ("mlp.gate_proj", (config["intermediate_size"], width)),
                            ("mlp.up_proj", (config["intermediate_size"], width)),
                            ("mlp.down_proj", (width, config["intermediate_size"]))):
            shapes[f"model.layers.{layer}.{name}"] = shape
    scale = dict(embed_tokens=1.0, lm_head=3 / width**0.5)  # else 1 / sqrt(inputs)
    weights = {f"{name}.weight": torch.randn(shape, generator=draw) * scale.get(name.split(".")[-1], shape[1]**-0.5)
               for name, shape in shapes.items()}
    norms = ["model.norm", *(f"model.layers.{layer}.{name}" for layer in range(config["num_hidden_layers"])
                             for name in ("input_layernorm", "post_attention_layernorm"))]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights | {f"{name}.weight": torch.ones(width) for name in norms}, folder / "model.safetensors",
              metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def codebooks(model: Path, path: Path, format: str = "cq4", rope: str = "post") -> Path:
    """A file of codebooks that a tiny model's random text gave."""
    from transformers import AutoModelForCausalLM

    from lowbit_attn import FORMATS
    from lowbit_attn.codebooks.calibrate import calibrate

    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    calibrate(network, torch.tensor(prompts(1, 1400, seed=9)[0]), FORMATS[format], rope=rope).save(path)
    return path


def smollm2(folder: Path = SMOLLM2) -> Path:
    """SmolLM2-135M-Instruct as a folder of safetensors, made once from the demo's GGUF file."""
    if (folder / "config.json").exists():
        return folder
    from safetensors.torch import save_file

    from lowbit_attn.demo import model as demo

    model, tokenizer = demo.load(demo.fetch(demo.default_folder()), "cpu", torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: x.contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    return folder


def prompts(count: int, length: int, seed: int = 0, vocab: int = 512) -> list[list[int]]:
    """Random token ids, lengths from ``length`` on in steps of 37."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length + 37 * i,), generator=draw).tolist() for i in range(count)]


def repeating(count: int, length: int, seed: int = 0, vocab: int = 512) -> list[list[int]]:
    """The same, of runs that come again and again, so that drafts from the prompt are made."""
    runs = prompts(count, 12, seed, vocab)
    return [(run * (length // len(run) + 1))[: length + 37 * i] for i, run in enumerate(runs)]
