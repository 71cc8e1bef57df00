"""Sums of the same rows over the GPUs of a host, in one launch each (hopper/all_reduce.py), for CUDA graphs too.

An all-reduce of a decode step's hidden states is a few tens of kilobytes: what it takes is not bytes but the latency of
its launches and barriers. Here each rank writes its part into the others' memory, and sums as the parts come.
"""

import torch
import torch.distributed as dist

from lowbit_attn import dispatch, loader
from lowbit_attn.agreement import Agreement
from lowbit_attn.checks import check_tensor, integer
from lowbit_attn.exchange import Slots
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels.all_reduce import VARIANTS, all_reduce_key, missing


class AllReduce:
    """Sums of rows of one width over the ranks of a group: Hopper GPUs of one host that reach each other's memory.

    Args:
        rows: most rows of a call; width: numbers of a row, a multiple of 64, up to 12,288 (kernels/all_reduce.py).
        dtype: float16 or bfloat16; device: this rank's GPU.
        group: a torch.distributed process group of 2 ranks or more; None: the default group.

    Every rank makes one together with the others and then makes the same calls, with as many rows, one after the other
    on one stream. Calls read nothing on the host and can be captured in a CUDA graph. What no kernel serves raises
    NotImplementedError. When one is made the ranks compare what they ask for (agreement.py): if one cannot make it, or
    asks for other rows, no rank makes it. Calls are not compared, which would take longer than the sum: a kernel that
    waits for a rank which does not come stops after about ten minutes, with an error of CUDA (hopper/common/slots.py).
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device,
                 group: "dist.ProcessGroup | None" = None):
        self.rank, world = dist.get_rank(group), dist.get_world_size(group)

        def made() -> tuple[dict, None]:
            self._make(integer("rows", rows), width, dtype, torch.device(device), world)
            return dict(rows=rows, width=width, dtype=str(dtype)), None

        Agreement(group, self.rank, world).reach("AllReduce", made)
        self.slots = Slots(rows, width // 2, self.device, group, world)

    def _make(self, rows: int, width: int, dtype: torch.dtype, device: torch.device, world: int) -> None:
        """This rank's part, which may fail; nothing is exchanged."""
        kind, target = dispatch.target_of(device) if device.type == "cuda" else (device.type, "")
        reasons = missing(width, dtype_name(dtype))
        reasons += [f"{kind}: supported: Hopper GPUs (sm_90) of one host"] * (kind != "hopper")
        reasons += [f"{world} ranks: supported: 2 or more"] * (world < 2)
        if reasons:
            raise NotImplementedError(f"all-reduce through the GPUs' memory: got {'; '.join(reasons)}")
        if rows < 1:
            raise ValueError(f"rows: got {rows}, supported: 1 or more")
        self.rows, self.width, self.dtype, self.device = rows, width, dtype, device
        self.kernels = {name: loader.load(all_reduce_key(target, dtype_name(dtype), width, name)) for name in VARIANTS}

    def sum(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over ranks of x [rows, width], in fp32 and rounded once; the same bits on every rank.

        out: of x's shape and dtype, which may be x; None: new memory.
        """
        return self._run("sum", x, out)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float,
                 out: torch.Tensor | None = None) -> torch.Tensor:
        """RMSNorm of the residual after the sum over ranks of x was added to it.

        x, residual: [rows, width]; residual, the same on all ranks, is changed in place and rounded once; weight:
        [width]; all of the dtype. out: of x's shape and dtype, which may be x but not the residual; None: new memory.
        """
        self._check("residual", residual, x.shape)
        self._check("weight", weight, (self.width,))
        if out is not None and out.data_ptr() == residual.data_ptr():
            raise ValueError("out: got the residual, supported: other memory, x's too")
        return self._run("add_norm", x, out, (residual.view(torch.uint32), weight.view(torch.uint32)), (epsilon,))

    def _check(self, name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
        check_tensor(name, x, shape, (self.dtype,), self.slots.peers.device)
        if not x.is_contiguous() or x.data_ptr() % 16:
            raise ValueError(f"{name}: got strides {x.stride()} at address {x.data_ptr():#x}, supported: contiguous "
                             "tensors at multiples of 16 bytes")

    def _run(self, name: str, x: torch.Tensor, out: torch.Tensor | None, tensors: tuple = (),
             numbers: tuple = ()) -> torch.Tensor:
        if x.dim() != 2 or not 1 <= len(x) <= self.rows:
            raise ValueError(f"x: got {list(x.shape)}, supported: [1 to {self.rows}, {self.width}]")
        self._check("x", x, (len(x), self.width))
        out = torch.empty_like(x) if out is None else out
        self._check("out", out, x.shape)
        slots = self.slots
        with torch.cuda.device(x.device):
            self.kernels[name](x.view(torch.uint32), slots.words, slots.peers, slots.calls, out.view(torch.uint32),
                               *tensors, self.rank, *numbers)
        return out
