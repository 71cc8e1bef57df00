"""Exchange of partial attention results between the ranks of a process group, and their merge by lse.

    Gather   one all-gather of the group (NCCL, gloo), then one merge: any devices
    Peers    one kernel, which writes to the other GPUs' memory and waits for theirs: Hopper GPUs of one host

Gather: a rank's part of a call is o, then lse, in one run of bytes of a buffer that has room for the parts of all
ranks. decode writes there, the all-gather works in place, and the merge reads all parts:

    every    [ranks, accesses, 16 bytes]
    a part   o [batch, q_len, num_heads, head_dim] | lse fp32 [batch, num_heads, q_len]
"""

import time
from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist

from lowbit_attn import _private, dispatch, kernels, loader, reference
from lowbit_attn.agreement import missing_rank
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels import QUANTIZE_HEAD_DIMS
from lowbit_attn.plan import ACCESS_BYTES

# one function under two names: torch 2.13 warns of the older one
GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
DTYPES = (torch.float16, torch.bfloat16)  # of both kernels


class Gather:
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
        self.rank, self.group = rank, group
        self.is_kernels = not is_reference and _has_kernel(buffer.device, dtype, head_dim)
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
        start = time.monotonic()
        try:
            GATHER(self.every, self.own, group=self.group)
        except RuntimeError as failure:  # a timeout, or a rank that has ended, where the host waits
            raise missing_rank("decode_sharded", self.rank, len(self.lse_parts), time.monotonic() - start,
                               failure) from failure
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


class Slots:
    """Memory of every rank that the others write (hopper/common/slots.py), for up to ``rows`` rows of so many words.

    Every rank makes one together with the others. Exchanges of several shapes share it.
    """

    def __init__(self, rows: int, row_words: int, device: torch.device, group, world: int):
        group = dist.group.WORLD if group is None else group
        shape = 2, world, rows, row_words
        words, addresses, self.kept = _private.shared_words(prod(shape), device, group)
        self.words = words.view(shape)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.calls = torch.zeros(rows, dtype=torch.int32, device=device).view(torch.uint32)
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # before others write, all must be zeros
            dist.barrier(group)


class Peers:
    """As Gather, through the memory of the other GPUs of this host."""

    def __init__(self, slots: Slots, kernel, shape: tuple[int, ...], dtype: torch.dtype, rank: int):
        batch, q_len, num_heads, _ = shape
        device = slots.peers.device
        self.slots, self.kernel, self.rank = slots, kernel, rank
        self.o = torch.empty(shape, dtype=dtype, device=device)
        self.lse = torch.empty(batch, num_heads, q_len, dtype=torch.float32, device=device)

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """As Gather.merge."""
        slots = self.slots
        with torch.cuda.device(out.device):
            self.kernel(self.o.view(torch.uint32), self.lse, slots.words, slots.peers, slots.calls,
                        out.view(torch.uint32), lse, self.rank)


def check_peers(device: torch.device) -> None:
    """Raise NotImplementedError unless GPUs of this kind exchange through each other's memory."""
    kind = dispatch.target_of(device)[0] if device.type == "cuda" else device.type
    if kind != "hopper":
        raise NotImplementedError(f"peer_memory: got {kind}, supported: Hopper GPUs (sm_90) of one host")


class Exchanges:
    """What a cache keeps for its calls: a Gather or Peers for each shape, over buffers of powers of two.

    has_peers: exchange through the other GPUs' memory.
    """

    def __init__(self, device: torch.device, group, rank: int, world: int, has_peers: bool = False):
        if has_peers and world > 1:
            check_peers(device)
        self.device, self.of, self.has_peers = device, (group, rank, world), has_peers
        self.found: dict[tuple, Gather | Peers] = {}
        self.buffers: dict[tuple, torch.Tensor | Slots] = {}

    def has(self, shape: torch.Size, dtype: torch.dtype, is_reference: bool) -> bool:
        """Whether calls of this shape were made before."""
        return (tuple(shape), dtype, is_reference) in self.found

    def ready(self, shape: torch.Size, dtype: torch.dtype, is_reference: bool) -> None:
        """Do the part of ``find`` that may fail on one rank alone: what follows is made by all of them together."""
        if self.has_peers:
            self._peer_kernel(dtype, shape[-1])
        else:
            self.find(shape, dtype, is_reference, False)

    @torch.inference_mode(False)  # else calls outside inference mode could not write to what is made here
    def find(self, shape: torch.Size, dtype: torch.dtype, is_reference: bool, is_capturing: bool) -> Gather | Peers:
        """The exchange for o of a shape and dtype; is_reference: torch merges what a Gather brings."""
        name = (tuple(shape), dtype, is_reference)
        if (exchange := self.found.get(name)) is not None:
            return exchange
        if is_capturing:
            raise RuntimeError("decode_sharded: captured before its first call of this shape, supported: after it")
        make = self._peers if self.has_peers else self._gather
        self.found[name] = exchange = make(*name)
        return exchange

    def _gather(self, shape: tuple[int, ...], dtype: torch.dtype, is_reference: bool) -> Gather:
        size = _power_of_two(self.of[2] * part_bytes(shape, dtype))
        if (size,) not in self.buffers:
            self.buffers[size,] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return Gather(self.buffers[size,], shape, dtype, is_reference, *self.of)

    def _peers(self, shape: tuple[int, ...], dtype: torch.dtype, is_reference: bool) -> Peers:
        *lead, head_dim = shape
        group, rank, world = self.of
        kernel = self._peer_kernel(dtype, head_dim)  # before what all ranks make together, for it may fail
        name = _power_of_two(prod(lead)), head_dim // 2 + 1  # words of o, then lse
        if name not in self.buffers:
            self.buffers[name] = Slots(*name, self.device, group, world)
        return Peers(self.buffers[name], kernel, shape, dtype, rank)

    def _peer_kernel(self, dtype: torch.dtype, head_dim: int) -> Callable:
        if dtype not in DTYPES or head_dim not in QUANTIZE_HEAD_DIMS:
            raise NotImplementedError(f"peer_memory: got {dtype} of head_dim {head_dim}, supported: "
                                      f"{', '.join(map(str, DTYPES))} of {', '.join(map(str, QUANTIZE_HEAD_DIMS))}")
        return loader.load(kernels.exchange_key(dispatch.target_of(self.device)[1], dtype_name(dtype), head_dim))


def _power_of_two(count: int) -> int:
    """The least that is not less."""
    return 1 << (count - 1).bit_length()
