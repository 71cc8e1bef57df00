"""What each decode path serves."""

from dataclasses import dataclass

import torch

from lowbit_attn.formats.contract import Format
from lowbit_attn.formats.spec import Kind
from lowbit_attn.kernels.key import SMALL, STREAM
from lowbit_attn.kernels.support import CodebookSupport, Support, unserved
from lowbit_attn.registers import WIDE_HEAD_DIM

FLOATS = (torch.float16, torch.bfloat16)
MAX_SMALL_PART = 9_216  # bytes: 12 warps an SM with two slots each, of the same size
WGMMA = "wgmma"
BOOK_TILE = "codebook64"  # the tile path of formats with codebooks
MAX_WIDE_RECORD = 68_544  # bytes left beside 16-bit tiles of K, V and Q of head_dim 256 in shared memory


@dataclass(frozen=True)
class TileSupport(Support):
    """Above WIDE_HEAD_DIM one whole record must fit beside the 16-bit tiles."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        found = super().missing(fmt, head_dim, dtype, features)
        if not found and head_dim > WIDE_HEAD_DIM and fmt.record_bytes(head_dim) > MAX_WIDE_RECORD:
            found = [f"record of {fmt.record_bytes(head_dim)} B at head_dim {head_dim}, "
                     f"supported: up to {MAX_WIDE_RECORD} B (K and V of 8 bits: in larger groups)"]
        return found


@dataclass(frozen=True)
class SmallSupport(Support):
    """One group a side, and parts of a record of which four CTAs' rings fit an SM's shared memory."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        found = super().missing(fmt, head_dim, dtype, features)
        if not found:
            record = fmt.record(head_dim)
            part = max(record.v_offset, record.nbytes - record.v_offset)
            if part > MAX_SMALL_PART:
                found = [f"part of a record of {part} B, supported: up to {MAX_SMALL_PART} B"]
        return found


@dataclass(frozen=True)
class BookTileSupport(CodebookSupport):
    """Codebooks on one side or on both; a side without one is as the tile path has it."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        try:
            k, v = fmt.specs(head_dim)
        except ValueError as error:
            return [str(error)]
        kinds = [side.kind for side in (k, v) if side]
        if len(kinds) < 2 or Kind.CODEBOOK not in kinds or k.high or v.wide:
            return [f"format {fmt}, supported: codebooks of K or V or both, affine codes on the other side"]
        affine = PATHS["tile"]
        wanted = [("K bits", k.bits, self.k_bits if k.kind is Kind.CODEBOOK else affine.k_bits),
                  ("V bits", v.bits, self.v_bits if v.kind is Kind.CODEBOOK else affine.v_bits),
                  ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
                  *(("feature", name, self.features) for name in features)]
        if any(spec.kind is Kind.CODEBOOK and spec.bits == 1 for spec in (k, v)):
            wanted.append(("head_dim with codebooks of 1 bit", head_dim, (128,)))
        return unserved(wanted)

    def __str__(self) -> str:
        return f"{super().__str__()}; one side may be as on the tile path; codebooks of 1 bit at head_dim 128"


PATHS = {
    "integer": Support(arithmetic="int8", clusters=True,
                       k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                       dtypes=FLOATS, storages=FLOATS, rows=(4,), wide_rows=(4,), channel_groups=(32, 64, 128),
                       windows=True, level_windows=True, boosted=True, boosted_values=True),
    # codes become numbers by fp16 instructions; fp32 ones, which bf16 needs, are too many
    WGMMA: Support(arithmetic="wgmma", k_bits=(4, 2), v_bits=(4, 2), k_groups=(32, 64, 128), head_dims=(64, 128),
                   dtypes=(torch.float16,), storages=(torch.float16,), rows=(32,), wide_rows=(32,),
                   channel_groups=(32, 64, 128), k_per_token=True, least_rows=17),
    "register": Support(arithmetic="fp16", clusters=True,
                        k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                        dtypes=FLOATS, storages=FLOATS, rows=(8, 16), wide_rows=(8,), channel_groups=(32, 64, 128),
                        k_per_token=True, windows=True, level_windows=True, boosted=True, boosted_values=True,
                        paired_bits=4),
    "tile": TileSupport(arithmetic="tile",
                        k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                        dtypes=FLOATS, storages=FLOATS, rows=(8, 64), wide_rows=(8, 64),
                        channel_groups=(32, 64, 128), k_per_token=True, windows=True),
    # the integer path in CTAs of a quarter of the warps, four an SM
    "small": SmallSupport(arithmetic="int8", schedule=SMALL,
                          k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(128,), head_dims=(64, 96, 128),
                          dtypes=FLOATS, storages=FLOATS, rows=(4,), wide_rows=(4,), windows=True, features=(),
                          boosted=True, boosted_values=True),
    # the integer path on Stream-K's schedule: all CTAs share all sequences' pages evenly
    "stream": Support(arithmetic="int8", schedule=STREAM,
                      k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128),
                      dtypes=FLOATS, storages=FLOATS, rows=(4,), wide_rows=(4,), channel_groups=(32, 64, 128),
                      windows=True, features=(), boosted=True, boosted_values=True),
    "codebook2": CodebookSupport(arithmetic="codebook2", k_bits=(4, 2), v_bits=(4, 2), k_groups=(), head_dims=(64, 128),
                                 dtypes=FLOATS, storages=(), rows=(2,), wide_rows=(2,), codebooks=True),
    "codebook": CodebookSupport(arithmetic="codebook", k_bits=(4, 2), v_bits=(4, 2), k_groups=(), head_dims=(64, 128),
                                dtypes=FLOATS, storages=(), rows=(4,), wide_rows=(4,), codebooks=True),
    "codebook8": CodebookSupport(arithmetic="codebook8", k_bits=(4, 2), v_bits=(4, 2), k_groups=(), head_dims=(64, 128),
                                 dtypes=FLOATS, storages=(), rows=(8,), wide_rows=(8,), codebooks=True),
    BOOK_TILE: BookTileSupport(arithmetic="codebook64", k_bits=(4, 2, 1), v_bits=(4, 2, 1), k_groups=(),
                               head_dims=(64, 128), dtypes=FLOATS, storages=(), rows=(64,), wide_rows=(64,),
                               codebooks=True),
    # keys before their rotary embedding, four codebooks of K a head: see codebooks.learn.Recipe
    "prerope": CodebookSupport(arithmetic="prerope", k_bits=(2,), v_bits=(4, 2), k_groups=(), head_dims=(128,),
                               dtypes=FLOATS, storages=(), rows=(4,), wide_rows=(4,), codebooks=True, pre_rope=True),
    "prerope8": CodebookSupport(arithmetic="prerope8", k_bits=(2,), v_bits=(4, 2), k_groups=(), head_dims=(128,),
                                dtypes=FLOATS, storages=(), rows=(8,), wide_rows=(8,), codebooks=True, pre_rope=True),
}
