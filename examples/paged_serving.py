"""A serving loop over pages: requests share a prompt, bring drafts, take some back, and end.

    python examples/paged_serving.py --prompt 1000 --requests 3 --steps 100

Random numbers stand for the model; what is shown is who holds which pages.
"""

import argparse
import random

import torch

import lowbit_attn

HEADS, HEADS_KV, HEAD_DIM, DRAFTS = 8, 2, 64, 4


def main(arguments: list[str] | None = None) -> None:
    """Serve the requests of one prompt; print pages at each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens that all requests begin with")
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = lowbit_attn.KVCache(args.format, num_pages=64, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM, device=device,
                                max_batch=args.requests, max_q_len=DRAFTS)

    def say(text: str) -> None:
        print(f"{cache.num_pages - cache.n_free:3d} of {cache.num_pages} pages in use: {text}")

    first = cache.add()
    cache.prefill(first, *tokens(device, 2, args.prompt, HEADS_KV))
    say(f"request {first} has read a prompt of {args.prompt} tokens")
    rows = [first]
    for _ in range(args.requests - 1):
        rows.append(cache.add())
        cache.share(first, rows[-1])
    say(f"{len(rows)} requests share it; only tokens that are still in 16 bit were copied")

    chance, kept = random.Random(0), 0
    for _ in range(args.steps):
        cache.append(tokens(device, len(rows), DRAFTS, HEADS_KV), tokens(device, len(rows), DRAFTS, HEADS_KV), rows)
        lowbit_attn.decode(tokens(device, cache.max_batch, DRAFTS, HEADS), cache)  # the model judges the drafts by it
        rejected = [chance.randrange(DRAFTS) for _ in rows]
        cache.rewind(rows, rejected)
        kept += sum(DRAFTS - n for n in rejected)
    say(f"{args.steps} steps brought {args.steps * DRAFTS * len(rows)} drafts, {kept} of them were kept")
    say("tokens of each request: " + ", ".join(map(str, cache.n_tok[rows].tolist())))

    cache.free(rows[:-1])
    say(f"all but request {rows[-1]} have ended; the prompt's pages stay, since it holds them")
    cache.free(rows[-1:])
    say("none is left")


def tokens(device: str, *size: int) -> torch.Tensor:
    """Random 16-bit vectors of head_dim channels."""
    return torch.randn(*size, HEAD_DIM, device=device, dtype=torch.float16)


if __name__ == "__main__":
    main()
