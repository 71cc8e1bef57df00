"""What the codebook path serves."""

from dataclasses import dataclass

import torch

from lowbit_attn.formats import Format, Kind
from lowbit_attn.kernels.support import Support


@dataclass(frozen=True)
class CodebookSupport(Support):
    """Codebooks on both sides, in the order by lanes."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        try:
            k, v = fmt.specs(head_dim)
        except ValueError as error:
            return [str(error)]
        if not (k and v and k.kind is v.kind is Kind.CODEBOOK):
            return [f"format {fmt}, supported: codebooks of K and of V"]
        wanted = (("K bits", k.bits, self.k_bits), ("V bits", v.bits, self.v_bits),
                  ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
                  *(("feature", name, self.features) for name in features))
        return [f"{name} {value}, supported: {', '.join(map(str, supported))}" for name, value, supported in wanted
                if value not in supported]
