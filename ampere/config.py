"""Sizes of the decode kernel on each target: warps, ring slots, and the shared memory they take."""

from dataclasses import dataclass

from lowbit_attn import layout
from lowbit_attn.formats import Format
from lowbit_attn.kernels import SMEM_LIMIT_BYTES, Checks

# (warps, ring slots of each), best first: the first that fits is taken. More warps hide the latency of the multiplies,
# more slots that of memory; two slots are the least that overlaps loading with arithmetic.
SHAPES = ((8, 3), (8, 2), (4, 3), (4, 2))

LANES = layout.LANES
ACCESS_BYTES = 16  # one cp.async, one LDS.128, one row of an ldmatrix
HALF_BYTES = 2
MMA_N = 8  # query rows of one KV head: the N side of m16n8k16
TILE = layout.TILE
SIDE_K, SIDE_V = 0, 1
ROW_PAD = 4  # floats between rows of the merge buffer: eight lanes in a row and four rows apart hit 32 banks


def static(n: int) -> tuple[int, ...]:
    """0 .. n - 1 as a tuple: a loop over it is unrolled while the kernel is traced, with Python ints."""
    return tuple(range(n))


@dataclass(frozen=True)
class Piece:
    """One part (K or V) of a record: what a ring slot holds. Units of 16 bytes, relative to the part."""

    first_unit: int  # in units of 128 bytes from the start of the record
    accesses: int
    meta: int  # where the metadata plane starts
    rows: int  # rows of the code matrix: tokens for K, channels for V
    cols: int
    bits: int

    @property
    def row_tiles(self) -> int:
        return self.rows // TILE

    @property
    def column_pairs(self) -> int:
        """Pairs of 16-column tiles: one 16-byte load of metadata serves a pair."""
        return self.cols // (2 * TILE)


@dataclass(frozen=True)
class DecodeConfig:
    """Everything about one kernel that is fixed when it is compiled."""

    target: str
    head_dim: int
    dtype: str
    warps: int
    slots: int
    k: Piece
    v: Piece

    @property
    def pieces(self) -> tuple[Piece, Piece]:
        return self.k, self.v

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def slot_accesses(self) -> int:
        return max(self.k.accesses, self.v.accesses)

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.slots * self.slot_accesses * ACCESS_BYTES

    @property
    def row_accesses(self) -> int:
        """16-byte accesses of one token in 16 bit."""
        return self.head_dim * HALF_BYTES // ACCESS_BYTES

    @property
    def tile16_tokens(self) -> int:
        """Tokens of one tile of 16-bit data: its K fills one ring slot at most, its V the next."""
        return 2 * TILE if 2 * TILE * self.row_accesses <= self.slot_accesses else TILE

    @property
    def merge_row(self) -> int:
        """Floats between two query rows of a warp's O in the merge buffer."""
        return self.head_dim + ROW_PAD

    @property
    def merge_floats(self) -> int:
        """Floats a warp hands to the merge: O, then its row maxima and row sums."""
        return MMA_N * self.merge_row + 2 * MMA_N

    @property
    def warp_floats(self) -> int:
        return self.slots * self.slot_accesses * ACCESS_BYTES // 4


def decode_config(fmt: Format, head_dim: int, dtype: str, target: str) -> DecodeConfig:
    """The configuration of one kernel, or ValueError with what was asked for and what is supported."""
    if target not in SMEM_LIMIT_BYTES:
        raise ValueError(f"target: got {target!r}, supported: {tuple(SMEM_LIMIT_BYTES)}")
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim: got {head_dim}, supported: 64, 128")
    if dtype != "float16":
        raise ValueError(f"dtype: got {dtype!r}, supported: 'float16'")
    k, v = _pieces(fmt, head_dim)
    configs = [DecodeConfig(target, head_dim, dtype, warps, slots, k, v) for warps, slots in SHAPES]
    limit = SMEM_LIMIT_BYTES[target]
    for config in configs:
        if config.shared_bytes <= limit and _own_ring_suffices(config):
            return config
    least = configs[-1]
    raise ValueError(f"format {fmt}, head_dim {head_dim}: {least.warps} warps with {least.slots} slots need "
                     f"{least.shared_bytes} B of shared memory, {target} has {limit} B a block")


def _own_ring_suffices(config: DecodeConfig) -> bool:
    """A warp's ring also holds a 16-bit tile and, at the end, the warp's O."""
    return (config.tile16_tokens * config.row_accesses <= config.slot_accesses
            and config.merge_floats <= config.warp_floats)


def _pieces(fmt: Format, head_dim: int) -> tuple[Piece, Piece]:
    record = fmt.record(head_dim)
    missing = []
    for side, planes, name, group in ((fmt.k, record.k_planes, "K", layout.PAGE_TOKENS),
                                      (fmt.v, record.v_planes, "V", head_dim)):
        if side.bits != 4:
            missing.append(f"{side.bits}-bit {name} (supported: 4)")
        if (getattr(side, "group_size", None) or head_dim) != group:
            missing.append(f"{name} groups of {side.group_size} (supported: {group})")
        if "float16" not in str(getattr(side, "storage", "")) or "bfloat16" in str(side.storage):
            missing.append(f"{name} metadata in {getattr(side, 'storage', 'another form')} (supported: float16)")
        if [p.name for p in planes] != ["codes", "meta"]:
            missing.append(f"{name} planes {[p.name for p in planes]} (supported: codes, meta)")
    if getattr(fmt.k, "transposed", None) is not None:
        missing.append("K per token (supported: per channel)")
    if missing:
        raise ValueError(f"format {fmt}: no kernel for {'; '.join(missing)}")
    tokens = layout.PAGE_TOKENS
    return (_piece(record.k_planes, 0, record.v_offset, tokens, head_dim, fmt.k.bits),
            _piece(record.v_planes, record.v_offset, record.nbytes, head_dim, tokens, fmt.v.bits))


def _piece(planes, start: int, stop: int, rows: int, cols: int, bits: int) -> Piece:
    codes, meta = planes
    assert codes.offset == start and start % layout.RECORD_ALIGN == 0 and meta.offset % ACCESS_BYTES == 0
    return Piece(start // layout.RECORD_ALIGN, (stop - start) // ACCESS_BYTES, (meta.offset - start) // ACCESS_BYTES,
                 rows, cols, bits)


def checks(fmt: Format, head_dim: int, target: str) -> Checks:
    """What the SASS of the decode kernel must show."""
    from lowbit_attn.ampere import decode, expected  # they import this module

    config = decode_config(fmt, head_dim, "float16", target)
    return Checks(decode.SASS_NEED, decode.SASS_FORBID, tuple(expected.expected_static(config).items()),
                  config.shared_bytes)
