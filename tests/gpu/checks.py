"""What the GPU tests share: problems with their answers, made once, and the test that a kernel repeats itself."""

from functools import cache

import torch

import lowbit_attn
from lowbit_attn import FORMATS, testing
from lowbit_attn.reference import PLAIN, Attention


@cache
def problem_and_expected(case: testing.Case, path: str,
                         options: Attention = PLAIN) -> tuple[testing.Problem, testing.Expected]:
    """Cases recur over architectures and split counts; their fp64 answers are made once."""
    problem = testing.build(case, "cuda")
    return problem, testing.expected(problem, options, path)


def query_weights(name: str, num_heads_kv: int, head_dim: int, device) -> torch.Tensor | None:
    """What a cache of this format needs: random by head, zero for some channels; None: nothing."""
    if not FORMATS[name].k.weighs_queries:
        return None
    weights = torch.rand(num_heads_kv, head_dim, generator=torch.Generator().manual_seed(2)) ** 3 * 8
    weights[:, ::9] = 0
    return weights.to(device)


def check_decode(case: testing.Case, path: str, group: str, record_property, num_splits: int | None = None,
                 options: Attention = PLAIN):
    """Decode into NaN-filled outputs, compare with fp64, record the worst error under ``group``; returns o."""
    return check_problem(*problem_and_expected(case, path, options), path, group, record_property, num_splits, options)


def check_problem(problem: testing.Problem, want: testing.Expected, path: str, group: str, record_property,
                  num_splits: int | None = None, options: Attention = PLAIN):
    """The same for a problem at hand."""
    case = problem.case
    out = torch.full_like(problem.q, float("nan"))
    lse = problem.q.new_full((case.batch, case.num_heads, case.q_len), float("nan"), dtype=torch.float32)
    lowbit_attn.decode(problem.q, problem.cache, num_splits=num_splits, out=out, lse=lse, path=path, **vars(options))
    record_property("group", group)
    record_property("error", max(testing.relative_error(out[b].cpu(), want.o[b]) for b in range(case.batch)))
    testing.assert_decode(out, lse, want)
    return out


def check_captured(problem: testing.Problem) -> None:
    """A call of two sequences of 700 and 300 tokens, captured once, reads the lengths of the moment."""
    cache, q = testing.to_device(problem.cache, "cuda"), problem.q
    lowbit_attn.decode(q, cache)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        lowbit_attn.decode(q, cache, out=out)
    for n_tok in ((700, 300), (690, 290)):
        cache.n_tok.copy_(torch.tensor(n_tok, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, lowbit_attn.decode(q, cache)[0])


def differing_values(problem: testing.Problem, path: str, launches: int = 1000, options: Attention = PLAIN) -> int:
    """Values of o and lse that differ from the first launch's over many launches beside a busy second stream."""
    asked = vars(options)
    first, first_lse = (x.clone() for x in lowbit_attn.decode(problem.q, problem.cache, path=path, **asked))
    other, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(launches):
        if i % 20 == 0:
            with torch.cuda.stream(other):
                load @ load
        o, lse = lowbit_attn.decode(problem.q, problem.cache, path=path, **asked)
        differing += (o.view(torch.int16) != first.view(torch.int16)).sum() + (lse != first_lse).sum()
    return int(differing)
