"""Texts to tokens, each special token once.

A tokenizer may put special tokens before a text (a beginning of text) and behind it (an end). A chat template writes
the first itself, and nothing is continued behind the second. So a text gets the tokens in front unless it has them
already, and none behind it.
"""

import torch

PROBE = "a"


def leading(tokenizer) -> list[int]:
    """The special tokens that a tokenizer of transformers puts before a text."""
    whole, bare = (list(tokenizer(PROBE, add_special_tokens=special).input_ids) for special in (True, False))
    if not bare:
        return whole[:1] if whole[:1] == [tokenizer.bos_token_id] else []
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def encode(tokenizer, text: str) -> list[int]:
    """Tokens of a text that begins with the special tokens that belong in front, once."""
    first, ids = leading(tokenizer), list(tokenizer(text, add_special_tokens=False).input_ids)
    return ids if ids[: len(first)] == first else first + ids


def tensor(tokenizer, text: str, device="cpu") -> torch.Tensor:
    """Tokens of a text, int64 [1, tokens]."""
    return torch.tensor([encode(tokenizer, text)], dtype=torch.long, device=device)


def chat(tokenizer, message: str) -> list[int]:
    """Tokens of a user's message and of the answer's beginning, by the chat template alone.

    Raises ValueError for a tokenizer without a template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: got a tokenizer without a chat template, supported: one of a model for chats")
    return list(tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True,
                                              return_dict=True)["input_ids"])
