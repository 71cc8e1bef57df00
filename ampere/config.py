"""Sizes of the decode kernel on each target: warps, ring slots, and the shared memory they take."""

from dataclasses import dataclass, replace

from lowbit_attn import layout
from lowbit_attn.formats import FORMATS, Format, Kind, SideSpec
from lowbit_attn.kernels.key import FEATURES, LEVEL_WINDOW, SMEM_LIMIT_BYTES, Checks, KernelKey

# (warps, ring slots of each), best first: the first that fits is taken. More warps hide the latency of the multiplies,
# more slots that of memory; two slots are the least that overlaps loading with arithmetic. One warp is slow: it is
# there for 8-bit codes at head_dim 256 on sm_89.
SHAPES = ((12, 3), (12, 2), (8, 3), (8, 2), (4, 3), (4, 2), (2, 3), (2, 2), (1, 3), (1, 2))
MAX_WARPS = 12  # of a block whose warps have rings of their own
MAX_WIDE_WARPS = 8  # the same where the registers of a thread are many: 8 warps may have 255 each, 12 only 168
FEW_WARPS = 2  # of a block: so few do not hide each other's wait for a copy (measured: k8v4 in sm_89's sizes)
SHARED_SLOTS = (4, 3, 2)  # of the one ring of a block whose warps share their pages

# Of an SM (CUDA programming guide, "Technical specifications per compute capability"); the system takes 1 KiB a block.
SM_SHARED_BYTES = {"sm_80": 167_936, "sm_89": 102_400, "sm_90": 233_472}
BLOCK_RESERVED_BYTES = 1024
SM_REGISTERS, THREAD_REGISTERS = 65_536, 256  # THREAD_REGISTERS: the most of a thread, as they are given out

LANES = layout.LANES
ACCESS_BYTES = 16  # one cp.async, one LDS.128, one row of an ldmatrix
HALF_BYTES = 2
TILE_COPIES = 16  # copies that a thread makes of a tile of 16-bit tokens: the addresses of more take too many registers
MMA_N = 8  # query rows of one m16n8k16: its N side
ROWS = (8, 16, 64)  # query rows that a CTA serves; fewer are a kernel of Hopper's integer path, 32 of its wgmma path
BOOK_ROWS = (2, 4, 8)  # the same on the codebook path
WARP_ROWS = 16  # query rows that a warp holds at most: one or two multiplies for each A fragment
TILE = layout.TILE
SIDE_K, SIDE_V = 0, 1
ROW_PAD = 4  # floats between rows of the merge buffer: eight lanes in a row and four rows apart hit 32 banks
PATH_NAMES = ("register", "tile", "codebook")
HEAD_DIMS = (64, 96, 128, 256)
TILE_HEAD_DIMS = (64, 128)  # of the tile path
WIDE = 256  # from this head_dim on, O of 8 rows fills a warp's registers
DTYPES = ("float16", "bfloat16")
MAX_WIDE_BITS = 4  # of V's first tokens: at the others' places in a half their codes then have at most 11 bits
BOOST_BITS = (2, 4)  # of K, and of its boosted channels: the high plane then has the bit positions of the low one


def static(*bounds: int) -> tuple[int, ...]:
    """A range as a tuple: a loop over it is unrolled while the kernel is traced, with Python ints."""
    return tuple(range(*bounds))


@dataclass(frozen=True)
class Piece:
    """One part (K or V) of a record: what a ring slot holds. Accesses of 16 bytes, relative to the part."""

    first_unit: int  # in units of 128 bytes from the start of the record
    accesses: int
    meta: int  # where the metadata plane starts
    rows: int  # rows of the code matrix: tokens for K, channels for V
    cols: int
    bits: int
    groups: int  # of metadata: token groups (per channel) or channel groups (per token)
    per_token: bool
    meta_dtype: str
    codes: int = 0  # where the plane of codes starts
    wide: "Piece | None" = None  # the codes of the first columns, which have more bits; ``codes`` then are the others'

    @property
    def levels(self) -> int:
        """The largest code, N."""
        return (1 << self.bits) - 1

    @property
    def row_tiles(self) -> int:
        return self.rows // TILE

    @property
    def column_tiles(self) -> int:
        return self.cols // TILE

    @property
    def runs(self) -> tuple[tuple[int, "Piece"], ...]:
        """(first column tile, matrix of codes) of consecutive columns of one width."""
        if self.wide is None:
            return ((0, self),)
        return (0, self.wide), (self.wide.column_tiles, replace(self, cols=self.cols - self.wide.cols, wide=None))

    @property
    def column_pairs(self) -> int:
        """Pairs of 16-column tiles: one 16-byte load of metadata serves a pair."""
        return self.cols // (2 * TILE)

    @property
    def column_words(self) -> int:
        """Words of codes that a lane holds of one column tile."""
        return layout.words_per_lane(self.rows, TILE, self.bits)


@dataclass(frozen=True)
class Boost:
    """Boosted channels of a K part: what the codes of a few channels have beyond the plane of all channels."""

    high: Piece  # their plane as a matrix of codes: tokens x slots
    index: int  # where the channels of the slots stand, a byte each
    channels: int  # slots that are channels; the rest, at most half a column tile, is padding

    def is_padding(self, column_tile: int, col8: int) -> bool:
        """Whether eight slots, half ``col8`` of a column tile, are padding."""
        return TILE * column_tile + TILE // 2 * col8 >= self.channels


@dataclass(frozen=True)
class DecodeConfig:
    """Everything about one kernel that is fixed when it is compiled."""

    target: str
    head_dim: int
    dtype: str  # of q and of 16-bit tokens
    path: str
    rows: int  # query rows of one KV head that a block serves at most
    warps: int
    slots: int
    k: Piece
    v: Piece
    has_mixed: bool = False  # tokens whose K is packed and whose V is still in 16 bit
    features: tuple[str, ...] = ()  # those of kernels.FEATURES it has
    boost: Boost | None = None

    @property
    def pieces(self) -> tuple[Piece, Piece]:
        return self.k, self.v

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp."""
        return warp_rows(self.head_dim, self.rows)

    @property
    def row_groups(self) -> int:
        """Sets of query rows in a block: 1, which all warps have and merge, or one for each warp."""
        return self.rows // self.warp_rows

    @property
    def shares_pages(self) -> bool:
        """Whether all warps walk the same pages through one ring, each with rows of its own; else each has its own."""
        return self.row_groups > 1

    @property
    def tail_pages(self) -> int:
        """Packed pages that the last split is given fewer, since it also has the pages whose V is in 16 bit."""
        return self.rings // 2 if self.has_mixed else 0

    @property
    def rings(self) -> int:
        return 1 if self.shares_pages else self.warps

    @property
    def ring_threads(self) -> int:
        """Threads that fill a ring."""
        return self.threads // self.rings

    @property
    def softcap(self) -> bool:
        return "softcap" in self.features

    @property
    def window(self) -> bool:
        return "window" in self.features

    @property
    def level_window(self) -> bool:
        """Whether a plane says what the window hides of a level; for one query."""
        return LEVEL_WINDOW in self.features

    @property
    def columns(self) -> int:
        """Multiplies of 8 columns that share an A fragment."""
        return -(-self.warp_rows // MMA_N)

    @property
    def columns_a_row(self) -> int:
        """Columns of a multiply that a query row has: several of each where there are fewer rows than columns."""
        return max(1, MMA_N // self.warp_rows)

    @property
    def row_values(self) -> int:
        """Query rows that a lane sees in an accumulator: rows 8n + 2t and 8n + 2t + 1 of every n, or one row."""
        return 1 if self.columns_a_row > 1 else 2 * self.columns

    @property
    def o_tiles(self) -> int:
        return self.head_dim // TILE

    @property
    def slot_accesses(self) -> int:
        return max(self.k.accesses, self.v.accesses, TILE * self.row_accesses)

    @property
    def shared_bytes(self) -> int:
        query = self.rows * self.head_dim * HALF_BYTES if self.path == "register" else 0
        return self.rings * self.slots * self.slot_accesses * ACCESS_BYTES + query

    @property
    def row_accesses(self) -> int:
        """16-byte accesses of one token in 16 bit."""
        return self.head_dim * HALF_BYTES // ACCESS_BYTES

    @property
    def tile16_tokens(self) -> int:
        """Tokens of one tile of 16-bit data: its K fills one ring slot at most, its V the next."""
        accesses = 2 * TILE * self.row_accesses
        fits = accesses <= self.slot_accesses and accesses <= TILE_COPIES * self.ring_threads
        return 2 * TILE if fits else TILE

    @property
    def token_buffers(self) -> int:
        """Tiles of 16-bit tokens in flight, a pair of slots each: a shared ring has no other warps to hide latency."""
        return min(2, self.slots // 2) if self.shares_pages else 1

    @property
    def merge_row(self) -> int:
        """Floats between two query rows of a warp's O in the merge buffer."""
        return self.head_dim + ROW_PAD

    @property
    def merge_floats(self) -> int:
        """Floats a warp hands to the merge: O, then its row maxima and row sums."""
        return self.rows * self.merge_row + 2 * self.rows

    @property
    def is_crowded(self) -> bool:
        """Whether a warp's registers are filled by 16 rows beside the code of pages whose V is in 16 bit."""
        return self.has_mixed and self.columns > 1

    @property
    def is_light(self) -> bool:
        """Whether a kernel is bound by its instructions, and has registers to spare: 8 rows, 2 bits, one group."""
        return (self.columns == 1 and self.k.bits == self.v.bits == 2 and self.k.groups == self.v.groups == 1
                and not self.k.per_token and self.v.wide is None and self.head_dim < WIDE)

    @property
    def may_spill(self) -> bool:
        """16 rows of 128 channels, or 256 channels, with several groups of K metadata: 255 registers fall short.

        So they do, by a few and outside of the page loop, where a format with two windows has 256 channels, or 16 rows
        and several groups of V metadata or features; so do 16 rows with groups of V metadata and features, and blocks
        of 64 rows with four groups or more of V metadata, or with 8-bit codes and every feature. At 128 channels 64
        rows do beside two groups of V metadata, levels' window, or every feature with K per token or a side in 8 bits;
        at 96 channels 16 rows with every feature, if levels' window is one. Of 12 warps' 168 registers one is missing
        beside four groups of K metadata and every feature. On sm_90, where these kernels are only tested, the latter
        need no features, and 16 rows with 8-bit codes of K and features fall short by one register too.
        """
        is_wide, has_all, is_tested = self.head_dim > 64, len(self.features) > 1, self.target == "sm_90"
        bits, has_levels = (self.k.bits, self.v.bits), LEVEL_WINDOW in self.features
        if self.shares_pages and is_wide and (self.v.groups > 2 or (has_all and bits == (8, 8))):
            return True
        if self.shares_pages and self.head_dim == 128 and (
                self.v.groups > 1 or has_levels or (has_all and (self.k.per_token or 8 in bits))):
            return True
        if self.has_mixed and self.head_dim > 128:
            return True
        if self.warps > MAX_WIDE_WARPS and self.k.groups > 2 and (has_all or is_tested):
            return True
        if self.columns > 1 and is_wide and self.features and (
                self.v.groups > 1 or (is_tested and self.k.bits == 8)):
            return True
        if self.columns > 1 and self.head_dim == 96 and has_all and has_levels:
            return True
        if self.is_crowded and is_wide and (self.v.groups > 1 or self.features):
            return True
        return self.k.groups > 1 and (self.head_dim > 128 or (self.columns > 1 and is_wide))

    @property
    def max_warps(self) -> int:
        """Warps of a block at most: more than 8 only where 168 registers do."""
        is_narrow = self.columns == 1 and (self.head_dim == 64 or (self.head_dim == 128 and self.k.groups == 1))
        return MAX_WARPS if is_narrow and self.path == "register" else min(MAX_WARPS, MAX_WIDE_WARPS)

    @property
    def parts_ahead(self) -> int:
        """Parts that are under way before the first is read. Where a slot is filled when the next part has come, one
        stays empty at first."""
        return self.slots - (not self.refills_at_once)

    @property
    def refills_at_once(self) -> bool:
        """Whether a slot is filled as soon as it is read: of a warp's own two slots one would stay empty, which a few
        warps do not hide."""
        return self.slots == 2 and self.warps <= FEW_WARPS and not self.shares_pages

    @property
    def query_parts(self) -> int:
        """Numbers in 16 bit that an element of q is for 16-bit tokens."""
        return 1

    @property
    def ctas_per_sm(self) -> int:
        """Blocks that an SM surely holds at once, whatever registers the compiler gives a thread; at least 1."""
        by_shared = SM_SHARED_BYTES[self.target] // (self.shared_bytes + BLOCK_RESERVED_BYTES)
        return max(1, min(by_shared, SM_REGISTERS // (THREAD_REGISTERS * self.threads)))

    @property
    def ring_floats(self) -> int:
        return self.slots * self.slot_accesses * ACCESS_BYTES // 4


def decode_config(fmt: Format, head_dim: int, dtype: str, target: str, path: str, rows: int,
                  features: tuple[str, ...] = ()) -> DecodeConfig:
    """The configuration of one kernel, or ValueError with what was asked for and what is supported."""
    for name, value, supported in (("target", target, tuple(SMEM_LIMIT_BYTES)), ("head_dim", head_dim, HEAD_DIMS),
                                   ("dtype", dtype, DTYPES), ("path", path, PATH_NAMES),
                                   ("rows", rows, BOOK_ROWS if path == "codebook" else rows_of(head_dim)),
                                   *(("features", f, (*FEATURES, LEVEL_WINDOW)) for f in features)):
        if value not in supported:
            at = f" at head_dim {head_dim}" if name == "rows" else ""
            raise ValueError(f"{name}: got {value!r}, supported{at}: {', '.join(map(str, supported))}")
    if path == "codebook":
        from lowbit_attn.ampere.codebook_config import codebook_config  # it imports this module

        return codebook_config(fmt, head_dim, dtype, target, rows, features)
    k, v = _pieces(fmt, head_dim)
    boost = _boost(fmt.k.spec(head_dim), k)
    if path == "tile":
        _check_tile(fmt, head_dim, dtype, rows, k, v)
    has_mixed = fmt.window_k != fmt.window_v
    configs = [DecodeConfig(target, head_dim, dtype, path, *shape, k, v, has_mixed, tuple(features), boost)
               for shape in _shapes(head_dim, rows)]
    limit = SMEM_LIMIT_BYTES[target]
    # a warp's own ring also holds, at the end, the warp's O
    fitting = [c for c in configs if c.shared_bytes <= limit and c.warps <= c.max_warps
               and (c.shares_pages or c.merge_floats <= c.ring_floats)]
    if fitting and fitting[0].shares_pages:  # four warps do not fill an SM: rather a second block than more slots
        return max(fitting, key=lambda c: (c.rows, min(c.ctas_per_sm, 2)))
    if fitting:
        return fitting[0]
    least = configs[-1]
    raise ValueError(f"format {fmt}, head_dim {head_dim}: {least.warps} warps with {least.slots} slots need "
                     f"{least.shared_bytes} B of shared memory, {target} has {limit} B a block")


def config_of(key: KernelKey, path: str) -> DecodeConfig:
    """The configuration of a decode kernel."""
    return decode_config(FORMATS[key.format], key.head_dim, key.dtype, key.target, path, key.rows, key.features)


def ctas_per_sm(key: KernelKey, path: str) -> int:
    """Blocks of a decode kernel that an SM surely holds at once."""
    return config_of(key, path).ctas_per_sm


def same_text(key: KernelKey, path: str) -> KernelKey:
    """The decode kernel of sm_80 if one of sm_89 has its sizes, and so its TileLang text; else the kernel itself."""
    if key.target != "sm_89":
        return key
    first = replace(key, target="sm_80")
    return first if config_of(first, path) == replace(config_of(key, path), target=first.target) else key


def rows_of(head_dim: int) -> tuple[int, ...]:
    """Row counts that kernels of a head_dim exist for."""
    return tuple(rows for rows in ROWS if head_dim < WIDE or rows != WARP_ROWS)


def warp_rows(head_dim: int, rows: int) -> int:
    """Query rows of a warp in a kernel of ``rows``."""
    return min(rows, WARP_ROWS if head_dim < WIDE else MMA_N)


def _shapes(head_dim: int, rows: int) -> tuple[tuple[int, int, int], ...]:
    """(rows, warps, ring slots) of a block, best first; a block with a shared ring may halve its rows to fit."""
    own = warp_rows(head_dim, rows)
    if own == rows:
        return tuple((rows, *shape) for shape in SHAPES)
    return tuple((n, n // own, slots) for n in (rows, rows // 2) for slots in SHARED_SLOTS)


def _check_tile(fmt: Format, head_dim: int, dtype: str, rows: int, k: Piece, v: Piece) -> None:
    missing = [f"{piece.bits}-bit {name} (supported: 4)" for name, piece in (("K", k), ("V", v)) if piece.bits != 4]
    missing += [f"{piece.groups} groups of {name} metadata (supported: 1)"
                for name, piece in (("K", k), ("V", v)) if piece.groups != 1]
    missing += [f"{name} metadata in {piece.meta_dtype} (supported: float16)"
                for name, piece in (("K", k), ("V", v)) if piece.meta_dtype != "float16"]
    missing += ["K per token (supported: per channel)"] * k.per_token
    missing += [f"head_dim {head_dim} (supported: 64, 128)"] * (head_dim not in TILE_HEAD_DIMS)
    missing += [f"dtype {dtype} (supported: float16)"] * (dtype != "float16")
    missing += [f"{rows} rows (supported: {MMA_N})"] * (rows != MMA_N)
    missing += ["V of two widths"] * bool(v.wide)
    missing += ["boosted channels of K"] * bool(fmt.k.spec(head_dim).high)
    missing += ["windows of K and V that differ"] * (fmt.window_k != fmt.window_v)
    if missing:
        raise ValueError(f"format {fmt}: no tile path for {'; '.join(missing)}")


def _pieces(fmt: Format, head_dim: int) -> tuple[Piece, Piece]:
    k, v = fmt.specs(head_dim)
    missing = []
    if not k or k.kind not in (Kind.CHANNEL, Kind.TOKEN) or k.transposed:
        missing.append("K neither per channel nor per token")
    elif k.high and (k.bits, k.high.code_bits) != BOOST_BITS:
        missing.append(f"K of {k.bits} bits boosted to {k.high.code_bits} "
                       f"(supported: {BOOST_BITS[0]} boosted to {BOOST_BITS[1]})")
    if not v or v.kind is not Kind.TOKEN or not v.transposed:
        missing.append("V not per token")
    elif v.wide and v.wide.bits > MAX_WIDE_BITS:
        missing.append(f"V of {v.wide.bits} bits over {v.bits} (supported: up to {MAX_WIDE_BITS})")
    if missing:
        raise ValueError(f"format {fmt}: no kernel for {'; '.join(missing)}")
    return _piece(k), _piece(v)


def _piece(side: SideSpec) -> Piece:
    assert side.codes % ACCESS_BYTES == side.meta % ACCESS_BYTES == 0
    nbytes = side.wide.positions if side.wide else side.nbytes  # positions are not copied
    piece = Piece(side.first_unit, nbytes // ACCESS_BYTES, side.meta // ACCESS_BYTES, side.rows, side.cols,
                  side.bits, side.groups, side.is_per_token, side.storage, side.codes // ACCESS_BYTES)
    if not side.wide:
        return piece
    wide = replace(piece, cols=side.wide.tokens, bits=side.wide.bits, codes=side.wide.codes // ACCESS_BYTES)
    return replace(piece, wide=wide)


def _boost(side: SideSpec, k: Piece) -> Boost | None:
    """Boosted channels of K; None if it has none."""
    high = side.high
    if not high:
        return None
    assert high.codes % ACCESS_BYTES == high.index % ACCESS_BYTES == 0
    plane = replace(k, cols=high.slots, bits=high.bits, codes=high.codes // ACCESS_BYTES)
    return Boost(plane, high.index // ACCESS_BYTES, high.channels)


def checks(fmt: Format, head_dim: int, target: str, path: str, rows: int, dtype: str = "float16",
           features: tuple[str, ...] = ()) -> Checks:
    """What the SASS of the decode kernel must show."""
    from lowbit_attn.ampere import codebook, combine, decode, pages  # they import this module

    config = decode_config(fmt, head_dim, dtype, target, path, rows, features)
    forbid = combine.SASS_FORBID + (() if config.may_spill else decode.SASS_FORBID)
    need = codebook.SASS_NEED if path == "codebook" else pages.STEPS[path].SASS_NEED
    return Checks(need + combine.SASS_NEED, forbid, config.shared_bytes)
