"""Exchange of partial attention results between the ranks of a process group: one all-gather, then one merge.

A rank's part of a call is o, then lse, in one run of bytes of a buffer that has room for the parts of all ranks. decode
writes there, the all-gather works in place, and the merge reads all parts:

    every    [ranks, accesses, 16 bytes]
    a part   o [batch, q_len, num_heads, head_dim] | lse fp32 [batch, num_heads, q_len]
"""

from math import prod

import torch
import torch.distributed as dist

from lowbit_attn import dispatch, kernels, loader, reference
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels import QUANTIZE_HEAD_DIMS
from lowbit_attn.plan import ACCESS_BYTES

DTYPES = (torch.float16, torch.bfloat16)  # of the merge kernel


class Exchange:
    """One shape of calls over the ranks of a group. Calls run one after the other, as those of a group do.

    Args:
        buffer: uint8 [at least ranks * nbytes], contiguous, aligned to 16 bytes.
        shape: of o, [batch, q_len, num_heads, head_dim]; dtype: of o.
        is_reference: whether torch merges, whatever the device.
        group, rank, world: the process group, this process's rank in it and how many there are.

    ``o`` and ``lse`` are this rank's part, written by the caller before ``merge``.
    """

    def __init__(self, buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, is_reference: bool, group,
                 rank: int, world: int):
        batch, q_len, num_heads, head_dim = shape
        nbytes, o_bytes, lse_shape = part_bytes(shape, dtype), prod(shape) * dtype.itemsize, (batch, num_heads, q_len)
        self.group, self.is_kernels = group, not is_reference and _has_kernel(buffer.device, dtype, head_dim)
        self.every = buffer[: world * nbytes]
        self.own = self.every[rank * nbytes : (rank + 1) * nbytes]
        parts = self.every.view(world, nbytes)
        lse_bytes = 4 * prod(lse_shape)
        self.o_parts = parts[:, :o_bytes].view(dtype).unflatten(1, shape)
        self.lse_parts = parts[:, o_bytes : o_bytes + lse_bytes].view(torch.float32).unflatten(1, lse_shape)
        self.o, self.lse = self.o_parts[rank], self.lse_parts[rank]
        if self.is_kernels:
            self.states = [self.every.view(kind).view(world, nbytes // ACCESS_BYTES, -1)
                           for kind in (dtype, torch.float32)]
            self.kernel = loader.load(kernels.merge_states_key(dispatch.target_of(buffer.device)[1], dtype_name(dtype),
                                                               head_dim))

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention over the tokens of all ranks, into out of o's shape and dtype and lse fp32, both contiguous."""
        dist.all_gather_into_tensor(self.every, self.own, group=self.group)
        if self.is_kernels:
            with torch.cuda.device(out.device):
                self.kernel(*self.states, out, lse)
            return
        o, logsumexp = reference.merge_states(self.o_parts, self.lse_parts)
        out.copy_(o)
        lse.copy_(logsumexp)


def _has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return device.type == "cuda" and dtype in DTYPES and head_dim in QUANTIZE_HEAD_DIMS


def part_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a rank's part for o of this shape [batch, q_len, num_heads, head_dim]: whole accesses."""
    batch, q_len, num_heads, head_dim = shape
    nbytes = batch * q_len * num_heads * (head_dim * dtype.itemsize + 4)
    return -(-nbytes // ACCESS_BYTES) * ACCESS_BYTES


class Exchanges:
    """What a cache keeps for its calls: an Exchange for each shape, over buffers of powers of two."""

    def __init__(self, device: torch.device, group, rank: int, world: int):
        self.device, self.of = device, (group, rank, world)
        self.found: dict[tuple, Exchange] = {}
        self.buffers: dict[int, torch.Tensor] = {}

    @torch.inference_mode(False)  # else calls outside inference mode could not write to what is made here
    def find(self, shape: torch.Size, dtype: torch.dtype, is_reference: bool, is_capturing: bool) -> Exchange:
        """The Exchange for o of a shape and dtype. One of a captured call that was not called before is the graph's."""
        name = (tuple(shape), dtype, is_reference)
        if (exchange := self.found.get(name)) is not None:
            return exchange
        size = 1 << (self.of[2] * part_bytes(shape, dtype) - 1).bit_length()
        buffer = self.buffers.get(size)
        if buffer is None:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
        exchange = Exchange(buffer, *name, *self.of)
        if not is_capturing:
            self.buffers[size], self.found[name] = buffer, exchange
        return exchange
