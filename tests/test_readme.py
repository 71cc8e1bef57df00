"""The README says what the code says, and its examples run."""

import re
from pathlib import Path

import pytest
import torch

from lowbit_attn import support

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_support_table_is_the_code_s():
    text = README.read_text()
    shown = text[text.index(support.BEGIN) + len(support.BEGIN) : text.index(support.END)].strip()
    assert shown == support.tables(), "run python -m lowbit_attn.support and put its output into README.md"


@pytest.fixture
def names(tmp_path):
    """What the examples take as given: a model's path and tokenized inputs."""
    transformers = pytest.importorskip("transformers", reason="the five-line example needs transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, head_dim=64, eos_token_id=None,
                                      pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (1, 150))
    return {"path": tmp_path, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


def test_there_are_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block, names):
    if "torch.cuda" in block:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        block = "import torch\n" + BLOCKS[0] + block  # goes on from the five lines
    if "LowBitCache" in block:
        from lowbit_attn.integrations.hf import CACHE_ARGUMENT

        block = re.sub(r"\bcache=", f"{CACHE_ARGUMENT}=", block)  # as the README says below the example
    exec(compile(block, str(README), "exec"), names)
    if "tokens" in names:
        assert names["tokens"].shape == (1, 190)
    else:
        assert names["o"].shape == (2, 1, 32, 128) and names["cache"].n_tok.tolist() == [1001, 78]
