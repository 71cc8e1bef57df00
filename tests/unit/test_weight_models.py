"""Models of many kinds through ``quantize``: dtypes, fused experts, layers with arguments of their own, placement."""

import json

import pytest
import torch
from safetensors import safe_open

transformers = pytest.importorskip("transformers")

import lowbit_attn.linear.hf  # noqa: E402, F401
from lowbit_attn.linear import VersionError, targets  # noqa: E402
from lowbit_attn.linear.calibration import Walk, decoder_layers  # noqa: E402
from lowbit_attn.linear.checkpoint import quantize_model  # noqa: E402

SMALL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             head_dim=32, vocab_size=32, max_position_embeddings=1024, bos_token_id=1, eos_token_id=1, pad_token_id=2,
             initializer_range=0.1)
HYBRID = dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"])
GEMMA_3N = dict(intermediate_size=[64] * 4, num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=32,
                laurel_rank=8, hidden_size_per_layer_input=16, activation_sparsity_pattern=[0.0] * 4, sliding_window=64,
                layer_types=HYBRID["layer_types"] * 2)
GEMMA_4 = dict(global_head_dim=32, num_kv_shared_layers=0, vocab_size_per_layer_input=32,
               hidden_size_per_layer_input=16, **HYBRID)
BLOOM = dict(n_layer=2, n_head=2)
MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2)


def build(name: str, **options):
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")
    return made(made.config_class(**(SMALL | options))).eval()


def ids(rows: int = 4) -> torch.Tensor:
    return torch.randint(3, 32, (rows * 512,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name, options", [("Gemma3n", GEMMA_3N), ("Gemma4", GEMMA_4), ("Bloom", BLOOM),
                                           ("Mixtral", MIXTRAL)])
@torch.no_grad()
def test_layers_are_replayed_with_their_own_arguments(name, options):
    """Per-layer inputs, alibi of each batch, shared K and V: as inside the model, in batches of unequal size."""
    model, tokens = build(name, **options), ids(3).reshape(6, 256)
    walk, caught = Walk(model, tokens), {}
    hook = walk.layers[-1].register_forward_pre_hook(
        lambda _, args, kwargs: caught.update(x=args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
    model(tokens, use_cache=False)
    hook.remove()
    for index in range(len(walk.layers) - 1):
        assert walk.moments(index)
        walk.advance(index)
    torch.testing.assert_close(walk.hidden, caught["x"], atol=1e-5, rtol=1e-4)
    walk.hidden = walk.hidden.clone()  # as a run that goes on reads them
    assert [one.shape for one in walk.batches] == [one.shape for one in Walk(model, tokens).batches]


def _looped(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: model.model.layers[1](
        out, position_embeddings=model.model.rotary_emb(out, torch.arange(out.shape[1])[None])))


def _counting(model):
    """A layer whose calls depend on how often it was called."""
    calls = []
    model.model.layers[0].register_forward_hook(lambda module, args, out: (calls.append(0), out * len(calls))[1])


def _without_text(model):
    def forward(*args, **kwargs):
        raise TypeError("a model of something else")
    model.forward = forward


@pytest.mark.parametrize("change, words", [
    (_looped, "in the order"), (_counting, "layer 0 of LlamaForCausalLM, called alone"),
    (_without_text, "LlamaForCausalLM cannot read a text: TypeError: a model of something else")])
def test_other_models_are_refused_before_anything_is_written(change, words, tmp_path):
    model = build("Llama")
    change(model)
    with pytest.raises(ValueError, match=words):
        quantize_model(model, None, ids(), "e8p4", tmp_path / "out", 2048)
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_quantized_are_refused(tmp_path):
    shared = build("Llama")
    shared.model.layers[1].mlp.up_proj = shared.model.layers[0].mlp.up_proj
    packed = build("Llama")
    packed.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), False)
    for model, words in ((shared, "layer 1 shares mlp.up_proj with layer 0"),
                         (packed, "layer 1, a Linear of torch.uint8")):
        with pytest.raises(ValueError, match=words):
            quantize_model(model, None, ids(), "e8p4", tmp_path / "out", 2048)
    assert not (tmp_path / "out").exists()


def test_experts_are_named_and_counted(tmp_path):
    """Fused experts stay as they are: every line and the summary say so, with the true bits a weight."""
    model, said = build("Mixtral", **MIXTRAL), []
    before = {name: p.clone() for name, p in model.named_parameters() if "experts" in name}
    made = quantize_model(model, None, ids(), "e8p4", tmp_path / "q", 2048, dtype=torch.float32,
                          on_layer=lambda *line: said.append(line[2]))
    experts = "mlp.experts.gate_up_proj, mlp.experts.down_proj"
    assert all(experts in line and "% of its weights" in line for line in said)
    layers = decoder_layers(model)[1]
    assert made.weights == sum(p.numel() for p in layers.parameters())
    assert made.left["mlp.experts.gate_up_proj"] == 2 * 4 * 2 * 64 * 64
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    stored = sum(t.nbytes for name, t in decoder_layers(again)[1].state_dict().items() if not name.endswith("header"))
    assert made.nbytes == stored and made.bits_per_weight == 8 * stored / made.weights
    assert 0.75 < made.share_left < 1
    assert all(torch.equal(p, before[name]) for name, p in again.named_parameters() if name in before)
    tokens = ids()[None, :64]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=1e-3, rtol=1e-3)


def test_routers_and_unread_modules_stay():
    layer = torch.nn.ModuleDict({
        "gate": torch.nn.Linear(64, 8), "gate_proj": torch.nn.Linear(64, 64),
        "shared_expert_gate": torch.nn.Linear(64, 1),
        "router": torch.nn.ModuleDict({"layer": torch.nn.Linear(64, 4)}), "k_proj": torch.nn.Linear(64, 16)})
    assert set(targets.linears(layer)) == {"gate_proj", "k_proj"}
    assert targets.remark(layer, ["gate_proj"]).startswith("; k_proj.weight, gate.weight, router.layer.weight and 1")
    assert targets.named({"experts.0.up.weight": 1, "experts.1.up.weight": 1}) == "experts.*.up.weight"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_the_published_dtype_is_written(name, tmp_path):
    """However the model was loaded, and whatever its weights would fit in."""
    model = build("Llama").to(getattr(torch, name))
    model.save_pretrained(tmp_path / "m")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    quantize_model(loaded, None, ids(), "e8p2", tmp_path / "q", 2048)
    assert json.loads((tmp_path / "q/config.json").read_text())["dtype"] == name
    with safe_open(tmp_path / "q/model.safetensors", "pt") as file:
        assert file.get_tensor("model.embed_tokens.weight").dtype == getattr(torch, name)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q").dtype == getattr(torch, name)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    quantize_model(build("Llama"), None, ids(), "e8p4", folder, 2048)
    return folder


@pytest.mark.parametrize("buffers", [False, True])
@torch.no_grad()
def test_offloaded_models_give_the_same(quantized, buffers, tmp_path):
    """accelerate's hooks keep weights on a disk between calls; with ``offload_buffers`` codes, too."""
    pytest.importorskip("accelerate")
    tokens = ids()[None, :64]
    want = transformers.AutoModelForCausalLM.from_pretrained(quantized)(tokens).logits
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
              "model.layers.0": "cpu", "model.layers.1": "disk"}
    model = transformers.AutoModelForCausalLM.from_pretrained(quantized, device_map=places, offload_buffers=buffers,
                                                              offload_folder=str(tmp_path))
    for _ in range(2):
        assert torch.equal(model(tokens).logits, want)
    with pytest.raises(ValueError, match="supported by dequantize: a model that was loaded onto one device"):
        model.dequantize()


def test_offloaded_headers_are_checked_at_the_first_call(quantized):
    model = transformers.AutoModelForCausalLM.from_pretrained(quantized)
    module = model.model.layers[0].mlp.up_proj
    module.header[0], module.header_is_due = 9, True
    with pytest.raises(VersionError, match="layout version 9"):
        model(ids()[None, :8])
