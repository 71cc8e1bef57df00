"""Layers of a LowBitCache alone: their sinks, what saturate clamps to, and masks under another default dtype."""

import pytest
import torch

pytest.importorskip("transformers")

from lowbit_attn import FORMATS  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402
from lowbit_attn.integrations.layer import LowBitLayer  # noqa: E402
from lowbit_attn.integrations.static import StaticLowBitLayer  # noqa: E402
from lowbit_attn.reference import PLAIN, Attention  # noqa: E402

HEADS, DIM = 2, 64
STEPS = (300, 1, 20, 1)
KINDS = {LowBitLayer: {}, StaticLowBitLayer: dict(max_seqlen=400)}


def feed(layer, k, v, sizes, options=PLAIN) -> torch.Tensor:
    """What a layer gives for keys as queries, brought K and V [1, HEADS, tokens, DIM] in steps of these sizes."""
    return torch.cat([layer.attend(layer.update(new_k, new_v)[0], new_k, options)
                      for new_k, new_v in zip(k.split(sizes, 2), v.split(sizes, 2))], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", (None, 5))
def test_a_layer_alone_has_the_sinks_of_its_format(kind, sinks):
    options = dict(KINDS[kind], window=60, keep_sinks=True, sinks=sinks)
    static = dict(static=True) if kind is StaticLowBitLayer else {}
    alone, made = kind(FORMATS["kitty"], **options), hf.LowBitCache("kitty", **options, **static)
    k, v = torch.randn(2, 1, HEADS, sum(STEPS), DIM)
    assert torch.equal(feed(alone, k, v, STEPS), feed(made.layer_class_to_replicate(), k, v, STEPS))
    assert alone.sinks == alone.kv.sinks == (32 if sinks is None else sinks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model, dtype", [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "bfloat16"),
                                          ("bfloat16", "float16"), ("float32", "float16")])
def test_a_step_sees_its_tokens_as_the_pages_hold_them(kind, model, dtype):
    """Also the prompt, which does not read the pages: values beyond what their metadata can hold are clamped."""
    model, dtype = getattr(torch, model), getattr(torch, dtype)
    layer = kind(FORMATS["k4v4"], **KINDS[kind], dtype=dtype, saturate=True)
    k = torch.randn(1, HEADS, STEPS[0], DIM).to(model)
    v = torch.full_like(k, torch.inf)
    out = feed(layer, k, v, STEPS[:1])
    most = layer.kv.largest[1]
    assert most <= torch.finfo(dtype).max and layer.kv.gather(0)[1].abs().max() <= most
    largest = torch.tensor(most).to(model)  # infinite where the model's dtype is too narrow for it
    torch.testing.assert_close(out, largest.expand_as(out), rtol=0.01, atol=0)
    if model is not torch.float16:
        assert feed(layer, k[:, :, :1], v[:, :, :1], (1,)).isfinite().all()


def test_a_16_bit_window_holds_what_its_dtype_can():
    layer = LowBitLayer(FORMATS["k4v4"], dtype=torch.bfloat16, saturate=True)
    k = torch.randn(1, HEADS, 20, DIM).bfloat16()
    feed(layer, k, torch.full_like(k, torch.inf), (20,), Attention(window=8))
    assert (layer.tail[1] == torch.finfo(torch.bfloat16).max).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("q_len", (1, 40, 300, 1001))
def test_masks_are_sampled_at_queries_that_there_are(dtype, q_len):
    asked = []

    def mask_function(batch, head, query, key):
        asked.append(query)
        return (key <= query) & (key > query - 100)

    torch.set_default_dtype(dtype)
    try:
        assert hf._window(mask_function, 100, 7, q_len, "cpu") == 100
    finally:
        torch.set_default_dtype(torch.float32)
    assert asked[0].min() == 7 and asked[0].max() == 7 + q_len - 1
    assert len(asked[0].unique()) == min(q_len, hf.SAMPLED_ROWS)
