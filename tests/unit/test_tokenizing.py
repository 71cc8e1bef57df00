"""Special tokens stand once in front of a text and never behind it, whatever the tokenizer adds."""

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from lowbit_attn import tokenizing  # noqa: E402

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}:{% endif %}")
WORDS = {name: i for i, name in enumerate(["<unk>", "<eos>", "<bos>", "<gmask>", *"abc:"])}
BOS, EOS, GMASK = WORDS["<bos>"], WORDS["<eos>"], WORDS["<gmask>"]


def made(single: str | None, bos: str | None = "<bos>", template: str | None = TEMPLATE):
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    if single:
        found.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=[(name, WORDS[name]) for name in ("<eos>", "<bos>", "<gmask>")])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<eos>", bos_token=bos,
                                                unk_token="<unk>", additional_special_tokens=["<gmask>", "<bos>"])
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("single, bos, first", [
    (None, "<bos>", []), ("<bos> $A", "<bos>", [BOS]), ("<bos> $A <eos>", "<bos>", [BOS]), ("$A <eos>", "<bos>", []),
    ("<gmask> <bos> $A", None, [GMASK, BOS]), ("<bos> $A", None, [BOS])])
def test_special_tokens_come_once(single, bos, first):
    tokenizer = made(single, bos)
    plain = [WORDS[c] for c in "abc"]
    assert tokenizing.leading(tokenizer) == first
    assert tokenizing.encode(tokenizer, "abc") == first + plain
    text = tokenizer.decode(first).replace(" ", "") + "abc"
    assert tokenizing.encode(tokenizer, text) == first + plain, "a text that has them already"
    assert tokenizing.encode(tokenizer, "") == first
    assert tokenizing.tensor(tokenizer, "abc").tolist() == [first + plain]


def test_chat_has_the_tokens_of_its_template():
    tokenizer = made("<bos> $A")
    assert tokenizing.chat(tokenizer, "abc") == [BOS, *(WORDS[c] for c in "abc:")]
    with pytest.raises(ValueError, match="chat: got a tokenizer without a chat template, supported"):
        tokenizing.chat(made("<bos> $A", template=None), "abc")


def test_texts_of_codebooks_have_special_tokens_at_their_start_alone():
    from lowbit_attn.codebooks.text import tokenized

    ids = tokenized(made("<bos> $A <eos>"), ["abc"] * 400, 1100).tolist()
    assert ids[0] == BOS and len(ids) == 1100 and not {BOS, EOS} & set(ids[1:])
