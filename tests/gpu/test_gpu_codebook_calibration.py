"""Calibration on a GPU: the same errors as on the CPU, from a model there; and codebooks of a prompt."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit_attn import FORMATS  # noqa: E402
from lowbit_attn.codebooks.calibrate import calibrate  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=96, intermediate_size=64, num_attention_heads=6, num_key_value_heads=2, vocab_size=97,
        max_position_embeddings=4096, num_hidden_layers=2, head_dim=64, initializer_range=0.15)).eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rope", ("post", "pre"))
def test_calibration_has_the_errors_of_the_cpu(model, rope):
    on_cpu = calibrate(model.cpu(), tokens(1200), FORMATS["cq2"], rope=rope)
    on_gpu = calibrate(model.cuda(), tokens(1200), FORMATS["cq2"], rope=rope)
    model.cpu()
    assert on_gpu.k_entries.device.type == "cpu" and on_gpu.metadata["config_hash"] == on_cpu.metadata["config_hash"]
    for name in ("logit_error", "value_error"):
        assert on_gpu.metadata[name] == pytest.approx(on_cpu.metadata[name], rel=0.1)


@pytest.mark.parametrize("codebooks", ("prompt", "prompt-post"))
def test_a_prompts_codebooks(model, codebooks):
    network = model.half().cuda()
    network.set_attn_implementation("lowbit")
    cache = LowBitCache("cq2", codebooks=codebooks, path="reference")
    ids = tokens(1100)[None].cuda()
    with torch.no_grad():
        for part in (slice(0, 1099), slice(1099, 1100)):
            out = network(ids[:, part], **{CACHE_ARGUMENT: cache}).logits
    model.float().cpu()
    assert out.isfinite().all() and cache.layers[0].rows[0].kv.device.type == "cuda"
