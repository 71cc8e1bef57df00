"""Dequant role of a side in codes of a codebook: entries gathered from shared memory to its 16-bit tile.

    K   (entry + mean of the page) / weight of the channel: keys as the model has them, in the order of stored channels
    V   entry * norm of the token

in fp32, rounded once; norms of fp16 in fp16. K's 16-bit tokens, which are stored keys too, come in two tiles: their
quotients rounded, then what the rounding left, so that a channel of large keys does not lose its digits.

A lookup is one PRMT, which puts the code above the group's offset in a row of the codebook, and one load.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp

from lowbit_attn import layout
from lowbit_attn.device import numbers, ptx
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.hopper.common.book_abi import RECIPROCAL_PLANE, Books
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.book_side import ATOM, ATOM_BYTES, EIGHT_BYTES, QUAD, TABLE_BYTES, BookTile
from lowbit_attn.hopper.tile.config import GROUP_WARPS, UNIT_TOKENS, UNITS, WARP, WORD, DecodeConfig
from lowbit_attn.hopper.tile.dequant import DequantThread, Pipe, unit_tile, unit_tiles
from lowbit_attn.hopper.tile.walk import token_tile_of
from lowbit_attn.registers import CHUNK, lane_place

LOW_TWICE, HIGH_TWICE = 0x1010, 0x3232  # selectors of bytes: a half in both halves
RUN_WORDS = order.RUN // WORD


class SharedBook(NamedTuple):
    """Shared memory of a side's codebook, uint32, and of 1 / weight of K's channels, fp32; the barrier of both."""

    table: cute.Pointer
    reciprocals: cute.Pointer
    full: cute.Pointer


class Lookup(NamedTuple):
    """What a lane's lookups have in common: address of the codebook; [step // 2] offsets in its rows of the groups of
    two steps, in bytes 0 and 1; words of an entry."""

    base: Int32
    offsets: list
    words: int

    def find(self, codes: Uint32, byte: int, step: int, more: int) -> list[Uint32]:
        """The entry that byte ``byte`` of ``codes`` names; more: bytes of a row that the group lies further on."""
        offset = ptx.permute(codes, self.offsets[step // 2], 0x7604 | byte << 4 | step % 2)
        return ptx.lookup(self.base + Int32(offset), more, self.words)


def start(cfg: DecodeConfig, side: BookTile, books: Books, head_idx: Int32, place: SharedBook) -> None:
    """Start the copies of a side's codebook; one lane does it, before its side's first page."""
    source = books.v if side.transposed else books.k
    extra = 0 if side.transposed else WORD * cfg.head_dim
    cute.arch.mbarrier_arrive_and_expect_tx(place.full, TABLE_BYTES + extra)
    policy, full = Int32(ptx.EVICT_UNCHANGED), place.full.toint()
    ptx.bulk_copy(place.table.toint(), source.iterator.toint() + Int64(head_idx) * TABLE_BYTES, TABLE_BYTES, full,
                  policy)
    if extra:
        plane = Int64(head_idx) * books.channels.shape[1] + RECIPROCAL_PLANE
        ptx.bulk_copy(place.reciprocals.toint(), books.channels.iterator.toint() + plane * extra, extra, full, policy)


@cute.jit
def run(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[BookTile], pipe: Pipe, place: SharedBook):
    """Consume the side's packed ring and fill its tile ring in the walk's order."""
    lane = Uint32(cute.arch.lane_idx())
    me = DequantThread(Uint32(cute.arch.make_warp_uniform(cute.arch.warp_idx())) % GROUP_WARPS, lane, *lane_place(lane))
    pages, parts = pipe.walk.num_pages, 1 if side.transposed else cfg.token_parts
    cute.arch.mbarrier_wait(place.full, 0)
    lookup = lookup_of(side, me, place)
    for i in cutlass.range(pages, unroll=1):
        fill = Uint32(i)
        rings.wait_full(pipe.packed, fill)
        rings.wait_empty(pipe.tiles, fill)
        if cutlass.const_expr(side.transposed):
            dequant_values(cfg, side, me, pipe, rings.stage(pipe.packed, fill), lookup)
        else:
            dequant_keys(cfg, side, me, pipe, rings.stage(pipe.packed, fill), lookup, place)
        rings.release(pipe.packed, fill)
        rings.publish(pipe.tiles, fill)
    for i in cutlass.range(pipe.walk.token_tiles * parts, unroll=1):
        tile, fill = token_tile_of(pipe.walk, i // parts), Uint32(pages + i)
        rings.wait_empty(pipe.tiles, fill)
        for u in cutlass.range(UNITS, unroll=1):
            piece = Uint32(pages + i * UNITS + u)
            rings.wait_full(pipe.packed, piece)
            copy_unit(cfg, side, me, pipe, rings.stage(pipe.packed, piece), Uint32(u), tile.live, i % parts, place)
            rings.release(pipe.packed, piece)
        rings.publish(pipe.tiles, fill)


def lookup_of(side: BookTile, me: DequantThread, place: SharedBook) -> Lookup:
    g, t = Int32(me.lane // 4), Int32(me.lane % 4)
    group_of = side.value_group if side.transposed else side.key_group
    offsets = [Int32(side.entry_offset(group_of(step, g, t), t)) for step in range(side.steps)]
    pairs = [Uint32(ptx.opaque(low | high << 8)) for low, high in zip(offsets[::2], offsets[1::2])]
    return Lookup(Int32(place.table.toint()), pairs, side.entry_bytes // WORD)


def load_run(cfg: DecodeConfig, side: BookTile, me: DequantThread, pipe: Pipe, stage: Int32, run) -> list[Uint32]:
    """The lane's four words of a run of codes."""
    view = cute.make_tensor(pipe.packed_smem, cute.make_layout(
        (RUN_WORDS, WARP, side.runs, cfg.packed_stages),
        stride=(1, RUN_WORDS, WARP * RUN_WORDS, cfg.stage_bytes(side) // WORD)))
    words = cute.make_rmem_tensor(RUN_WORDS, Uint32)
    cute.autovec_copy(view[None, Int32(me.lane), run, stage], words)
    return [words[i] for i in range(RUN_WORDS)]


def beside(cfg: DecodeConfig, side: BookTile, pipe: Pipe, words: int) -> cute.Tensor:
    """(words, index, stage): what stands beside a page's codes, so many words at once."""
    count = side.head_dim if not side.transposed else layout.PAGE_TOKENS
    return cute.make_tensor(pipe.packed_smem + side.meta // WORD, cute.make_layout(
        (words, 2 * count // (WORD * words), cfg.packed_stages),
        stride=(1, words, cfg.stage_bytes(side) // WORD)))


def store(pipe: Pipe, place: Int32, more: int, words: list[Uint32]) -> None:
    """Words of a code's channels to the tile, ``more`` bytes behind byte ``place``."""
    count = len(words)
    out = cute.make_tensor(cute.recast_ptr(pipe.tile_smem, dtype=Uint32), cute.make_layout(
        (count, 1 << 16), stride=(1, count)))
    found = cute.make_rmem_tensor(count, Uint32)
    for i, word in enumerate(words):
        found[i] = word
    cute.autovec_copy(found, out[None, place // (WORD * count) + more // (WORD * count)])


def ahead(batches: list, lookups_of):
    """(batch, its entries) of each batch, when the lookups of the next one are under way: loads do not pass stores."""
    found = lookups_of(batches[0])
    for batch, following in zip(batches, [*batches[1:], None]):
        entries = found
        if following is not None:
            found = lookups_of(following)
        yield batch, entries


# ---- K


def selectors_of(side: BookTile, g: Int32) -> list[Uint32]:
    """[step // 4] how PRMT brings a lane's codes of a block and atom to the order of its steps."""
    found = []
    for first in range(0, side.steps, QUAD):
        nibbles = [Int32(side.key_byte(first + i, g)) << 4 * i for i in range(QUAD)]
        found.append(Uint32(ptx.opaque(nibbles[0] | nibbles[1] | nibbles[2] | nibbles[3])))
    return found


def dequant_keys(cfg: DecodeConfig, side: BookTile, me: DequantThread, pipe: Pipe, stage: Int32, lookup: Lookup,
                 place: SharedBook) -> None:
    """A page of K -> its tile: this warp's runs."""
    g, t = Int32(me.lane // 4), Int32(me.lane % 4)
    words_an_atom, size = side.steps // QUAD, side.group_size
    selectors = selectors_of(side, g)
    groups = [side.key_group(step, g, t) for step in range(side.steps)]
    places = [Int32(side.place(g, size * group)) for group in groups]
    mine = range(side.runs // GROUP_WARPS)
    codes = [load_run(cfg, side, me, pipe, stage, Int32(me.warp) + GROUP_WARPS * i) for i in mine]
    apart = EIGHT_BYTES * side.blocks_a_run  # bytes of the tile between runs
    own_places = [at + Int32(me.warp) * apart for at in places]
    for atom in range(side.atoms):
        shifts = [key_shift(cfg, side, pipe, stage, place, side.groups // side.atoms * atom + group)
                  for group in groups]

        def entries_of(at: tuple[int, int], atom: int = atom) -> list[list[Uint32]]:
            i, block = at
            first = (block * side.atoms + atom) * words_an_atom
            own = codes[i][first : first + words_an_atom]
            ordered = [ptx.permute(own[0], own[-1], selector) for selector in selectors]
            return [lookup.find(ordered[step // QUAD], step % QUAD, step, order.BOOK_ROW_BYTES // 2 * atom)
                    for step in range(side.steps)]

        for (i, block), entries in ahead([(i, b) for i in mine for b in range(side.blocks_a_run)], entries_of):
            more = side.place(8 * block, ATOM * atom) + GROUP_WARPS * apart * i
            for step, entry in enumerate(entries):
                store(pipe, own_places[step], more, keys_of(cfg, entry, shifts[step]))


def key_shift(cfg: DecodeConfig, side: BookTile, pipe: Pipe, stage: Int32, place: SharedBook,
              group: Int32) -> list[tuple]:
    """[channel of a code] (1 / weight, mean / weight) of a group. A mean that is no number, or infinite, gives NaN."""
    size = side.group_size
    means = cute.make_rmem_tensor(size // 2, Uint32)
    cute.autovec_copy(beside(cfg, side, pipe, size // 2)[None, group, stage], means)
    factors = cute.make_rmem_tensor(size, Float32)
    cute.autovec_copy(reciprocals(side, place, size)[None, group], factors)
    wide = [x for i in range(size // 2) for x in numbers.widen(means[i], side.storage)]
    return [(factors[i], mean * factors[i] + (mean - mean)) for i, mean in enumerate(wide)]


def reciprocals(side: BookTile, place: SharedBook, count: int) -> cute.Tensor:
    """(count, index): 1 / weight of so many channels at once."""
    return cute.make_tensor(place.reciprocals, cute.make_layout((count, side.head_dim // count), stride=(1, count)))


def keys_of(cfg: DecodeConfig, entry: list[Uint32], shift: list[tuple]) -> list[Uint32]:
    """An entry's keys in the tile's type."""
    values = [x for word in entry for x in numbers.widen(word, "float16")]
    keys = [x * factor + mean for x, (factor, mean) in zip(values, shift)]
    return [finite(cfg, numbers.pack(*keys[i : i + 2], numbers.ELEMENT[cfg.dtype])) for i in range(0, len(keys), 2)]


def finite(cfg: DecodeConfig, word: Uint32) -> Uint32:
    """Halves within fp16's range: an Inf times P = 0 is a NaN. A NaN stays."""
    return ptx.clamp_f16x2(word) if cfg.dtype == "float16" else word


# ---- V


def dequant_values(cfg: DecodeConfig, side: BookTile, me: DequantThread, pipe: Pipe, stage: Int32,
                   lookup: Lookup) -> None:
    """A page of V -> its tile: this warp's runs. A run has blocks of 16 tokens, or a part of the groups of one."""
    g, t = Int32(me.lane // 4), Int32(me.lane % 4)
    blocks, parts = side.blocks_a_run, side.parts_a_block
    channels = [side.group_size * side.value_group(step, g, t) for step in range(side.steps)]
    places = [[Int32(side.place(2 * t + e, channel)) for e in range(2)] for channel in channels]
    is_odd = t % 2 != 0
    for i in range(side.runs // GROUP_WARPS):
        run = Int32(me.warp) + GROUP_WARPS * i
        words = load_run(cfg, side, me, pipe, stage, run)
        for block in range(blocks):
            own = words[block * side.steps : (block + 1) * side.steps]
            if side.steps == QUAD:  # ``value_word``: odd t ask for the second and the fourth in the other order
                own[1], own[3] = (cutlass.select_(is_odd, own[a], own[b]) for a, b in ((3, 1), (1, 3)))
            number = run * blocks // parts + block  # of the page's blocks
            norms = norms_of(cfg, side, pipe, stage, number, t)
            first = number * (2 * EIGHT_BYTES)
            if parts > 1:
                first = first + run % parts * (layout.PAGE_TOKENS * ATOM_BYTES)
            of_part = lookup
            if parts > 1:
                of_part = lookup._replace(base=lookup.base + order.BOOK_ROW_BYTES // parts * (run % parts))

            def entries_of(half: int, own: list = own, of_part: Lookup = of_part) -> list[list[Uint32]]:
                return [of_part.find(own[step], 2 * half + e, step, 0) for step in range(side.steps) for e in range(2)]

            for half, entries in ahead([0, 1], entries_of):
                for at, entry in enumerate(entries):
                    values = [value_of(cfg, word, norms, half, at % 2) for word in entry]
                    store(pipe, places[at // 2][at % 2] + first, EIGHT_BYTES * half, values)


def norms_of(cfg: DecodeConfig, side: BookTile, pipe: Pipe, stage: Int32, block: Int32, t: Int32) -> list | None:
    """[eight] words with the norms of tokens 2t, 2t + 1 of a block of 16; infinite ones become NaN. None: no norms."""
    if side.meta >= side.nbytes:
        return None
    words = cute.make_rmem_tensor(2, Uint32)
    at = block // 2 * (2 * QUAD) + 2 * t + block % 2  # codebook_order.norm_index, in four halves
    cute.autovec_copy(beside(cfg, side, pipe, 2)[None, at, stage], words)
    zero = Uint32(ptx.opaque(0))
    return [ptx.add_f16x2(words[i], ptx.mul_f16x2(words[i], zero)) for i in range(2)]


def value_of(cfg: DecodeConfig, word: Uint32, norms: list | None, half: int, e: int) -> Uint32:
    """Two channels of token ``2t + e`` of an eight, in the tile's type."""
    element = numbers.ELEMENT[cfg.dtype]
    if norms is None:
        return word if cfg.dtype == "float16" else numbers.pack(*numbers.widen(word, "float16"), element)
    if cfg.dtype == "float16":
        twice = ptx.permute(norms[half], norms[half], HIGH_TWICE if e else LOW_TWICE)
        return finite(cfg, ptx.mul_f16x2(word, twice))
    norm = numbers.widen(norms[half], "float16")[e]
    return numbers.pack(*(x * norm for x in numbers.widen(word, "float16")), element)


# ---- 16-bit tokens


@cute.jit
def copy_unit(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[BookTile], me: DequantThread, pipe: Pipe,
              stage: Int32, unit: Uint32, live: Int32, part: Int32, place: SharedBook):
    """32 rows of 16 bit -> their part of a tile. K: quotients by the weights, or (part 1) what their rounding left; V:
    tokens from ``live`` on are zeroed."""
    row_chunks = cfg.row_pitch // (2 * CHUNK)
    rows = cute.make_tensor(cute.recast_ptr(pipe.packed_smem, dtype=Float16), cute.make_layout(
        (CHUNK, row_chunks, UNIT_TOKENS, cfg.packed_stages),
        stride=(1, CHUNK, cfg.row_pitch // 2, cfg.stage_bytes(side) // 2)))
    out = cute.make_tensor(cute.recast_ptr(pipe.tile_smem, dtype=Float16), cute.make_layout(
        (CHUNK, side.tile_bytes // (2 * CHUNK)), stride=(1, CHUNK)))
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), Float16)
    keep = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    for j in cutlass.range_constexpr(unit_tiles(side) // GROUP_WARPS):
        token_tile, channel_tile = unit_tile(side, me.warp, j)
        frag = cute.make_rmem_tensor(8, Float16)
        cute.copy(load, rows[None, 2 * channel_tile + me.col8, token_tile * layout.TILE + me.row, stage], frag)
        words = cute.recast_tensor(frag, Uint32)
        token = Int32(unit) * UNIT_TOKENS + layout.TILE * token_tile
        for matrix in cutlass.range_constexpr(4):
            row8, col8 = matrix % 2, matrix // 2
            if cutlass.const_expr(side.transposed):
                is_live = Uint32(token + 8 * row8 + Int32(me.lane // 4) < live)
                words[matrix] = words[matrix] & (Uint32(0) - is_live)
            else:
                pair = 8 * Int32(channel_tile) + 4 * col8 + Int32(me.lane % 4)
                words[matrix] = quotient(cfg, side, words[matrix], pair, part, place)
        at = side.place(token + Int32(me.row), layout.TILE * Int32(channel_tile) + 8 * Int32(me.col8))
        cute.copy(keep, frag, out[None, at // (2 * CHUNK)])


def quotient(cfg: DecodeConfig, side: BookTile, word: Uint32, pair: Int32, part: Int32, place: SharedBook) -> Uint32:
    """Two stored channels of a key by their weights, rounded (part 0), or what that leaves (part 1). What is no number,
    or infinite, gives NaN."""
    element = numbers.ELEMENT[cfg.dtype]
    factors = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(reciprocals(side, place, 2)[None, pair], factors)
    exact = [x * factors[i] + (x - x) for i, x in enumerate(numbers.widen(word, cfg.dtype))]
    rounded = finite(cfg, numbers.pack(*exact, element))
    left = numbers.pack(*(x - y for x, y in zip(exact, numbers.widen(rounded, cfg.dtype))), element)
    return Uint32(cutlass.select_(part == 0, rounded, finite(cfg, left)))
