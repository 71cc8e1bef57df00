"""A LowBitCache that was reset serves the next model as a new one would: nothing of the model before is left."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, tokens  # noqa: E402

from lowbit_attn import FORMATS  # noqa: E402
from lowbit_attn.codebooks.calibrate import calibrate  # noqa: E402
from lowbit_attn.codebooks.file import CodebookFileError  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402

OTHERS = {
    "heads": ("llama", dict(num_key_value_heads=1)),
    "head_dim": ("llama", dict(head_dim=128)),
    "layers": ("llama", dict(num_hidden_layers=1)),
    "theta": ("llama", dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
    "sliding": ("mistral-sliding", {}),
    "bfloat16": ("llama", {}),
}
KINDS = {
    "k4v4": dict(format="k4v4"), "kitty-weighted": dict(format="kitty-weighted"), "lowbit": dict(
        format="k4v4", sliding="lowbit"), "boost": dict(format="k4v2-boost"), "lean": dict(format="lean"),
    "static": dict(format="k4v4", static=True, max_seqlen=300, sliding="lowbit"),
}


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def others():
    models = {name: build(family, **options) for name, (family, options) in OTHERS.items()}
    models["bfloat16"].to(torch.bfloat16)
    return models


@torch.no_grad()
def read(model, cache, count: int = 150, sizes: tuple[int, ...] = (140, 1, 9)) -> torch.Tensor:
    model.set_attn_implementation(hf.NAME)
    ids = tokens(count)
    return torch.cat([model(part, **{hf.CACHE_ARGUMENT: cache}).logits for part in ids.split(sizes, 1)], 1)


def outcome(model, cache, **steps):
    try:
        return read(model, cache, **steps)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_the_next_model_is_served_as_by_a_new_cache(llama, others, kind, name):
    """Also by layers that a call with the first model made, and that hold none of the second model's tokens."""
    cache = hf.LowBitCache(**KINDS[kind])
    read(llama, cache)
    cache.reset()
    got, want = outcome(others[name], cache), outcome(others[name], hf.LowBitCache(**KINDS[kind]))
    if isinstance(got, str) and kind == "static" and name in ("heads", "head_dim", "bfloat16"):
        assert "for which this static cache has its memory" in got
        return
    assert torch.equal(got, want)
    cache.reset()
    assert torch.equal(read(llama, cache), read(llama, hf.LowBitCache(**KINDS[kind])))


@pytest.mark.parametrize("empty", ("reset", "crop"))
def test_codebooks_of_another_model_are_refused_by_a_used_cache(llama, others, empty):
    llama.set_attn_implementation("sdpa")
    books = calibrate(llama, tokens(1500)[0], FORMATS["cq2"])
    cache = hf.LowBitCache("cq2", codebooks=books, max_q_len=4)
    if empty == "reset":
        read(llama, cache)
        cache.reset()
    else:
        read(llama, cache, 3, (3,))
        cache.crop(-3)
    with pytest.raises(CodebookFileError, match="whose configuration is not that of this llama model"):
        read(others["theta"], cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(read(llama, cache), read(llama, hf.LowBitCache("cq2", codebooks=books, max_q_len=4)))


@pytest.mark.parametrize("name", ("theta", "head_dim", "heads"))
def test_codebooks_of_a_prompt_follow_the_model(llama, others, name):
    cache = hf.LowBitCache("cq2", codebooks="prompt")
    read(llama, cache, 1100, (1100,))
    cache.reset()
    got = read(others[name], cache, 1110, (1100, 10))
    assert torch.equal(got, read(others[name], hf.LowBitCache("cq2", codebooks="prompt"), 1110, (1100, 10)))
