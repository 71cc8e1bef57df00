"""Instruction counts predicted from arithmetic, to hold against the disassembly (SASS) of a built kernel.

The code of a page is straight-line and appears once in the SASS, so static counts (``expected_static``) are those of
one packed page and warp (``per_page``) plus what stands outside the page loop: the copies of the first parts, one tile
of 16-bit tokens, a page whose V is in 16 bit, and the merges. Integer instructions of addresses, masks and guards are
not predicted: LOP3 comes out up to half as much again. Softcap and window are not counted either.
"""

from collections import Counter
from math import gcd

from lowbit_attn import layout
from lowbit_attn.ampere import combine, dequant, load, mixed
from lowbit_attn.ampere.config import LANES, TILE, DecodeConfig

TOKEN_TILES = layout.PAGE_TOKENS // TILE
REGISTERS = 4  # of an A fragment: one LOP3 each


def per_page(config: DecodeConfig) -> dict[str, int]:
    """Counts of one packed page and warp."""
    return _tile_page(config) if config.path == "tile" else _register_page(config)


def _copies(config: DecodeConfig, accesses: int) -> int:
    """Copies of 16 bytes that each thread of a ring makes."""
    return -(-accesses // config.ring_threads)


def _code_loads(words: int) -> int:
    """Shared loads of a run of a lane's words: of as many as the run's start is aligned to."""
    return words // gcd(layout.BLOCK_WORDS, words)


def _register_page(config: DecodeConfig) -> dict[str, int]:
    return dict(Counter(_k_part(config)) + Counter(_v_part(config)))


def _k_part(config: DecodeConfig) -> dict[str, int]:
    """Logits of a packed page; without its copies."""
    k, n = config.k, config.columns
    tiles = k.row_tiles * k.column_tiles
    run = layout.BLOCK_WORDS if k.per_token else k.row_tiles  # row tiles of a column tile multiplied in one go
    visits = k.column_tiles * (k.row_tiles // run)  # each loads q' too: by ldmatrix where channels are gathered
    loads = visits * _code_loads(layout.words_per_lane(TILE * run, TILE, k.bits))
    multiplies, largest, gathers = n * tiles, 0, 0
    if config.boost is None:
        loads += visits
    else:
        high = config.boost.high
        tiles += high.row_tiles * high.column_tiles
        loads += high.column_tiles * (_code_loads(high.column_words) + 2)  # the lane's slot: its channel, its scale
        gathers = visits + high.column_tiles
        multiplies += n * high.column_tiles * (high.row_tiles + 2)
    if k.per_token:
        loads += TOKEN_TILES * k.groups
    else:
        both = 1 if k.meta_dtype == "float16" else 2  # the zero-points' largest too
        largest = both * k.groups
        loads += k.column_tiles * (k.groups + 1 + (k.groups > 1))
        loads += both * k.groups * -(-config.head_dim // 2 // LANES)
        multiplies += n * k.column_tiles * (1 + k.groups)
    return {"HMMA": multiplies, "LDS": loads, "LDSM": gathers, "LOP3": REGISTERS * tiles, "REDUX": largest}


def _v_part(config: DecodeConfig) -> dict[str, int]:
    """O of a packed page, and the copies of one."""
    k, v, n = config.k, config.v, config.columns
    tiles = v.row_tiles * v.column_tiles
    loads = v.column_tiles * _code_loads(v.column_words)
    loads += TOKEN_TILES * v.groups + v.groups * layout.PAGE_TOKENS // LANES  # (scale, zero) pairs; their largest scale
    return {"HMMA": n * tiles, "LDS": loads, "LOP3": REGISTERS * tiles,
            "LDGSTS": _copies(config, k.accesses) + _copies(config, v.accesses),
            "MOVM": 2 * TOKEN_TILES * v.groups * n, "REDUX": 1}


def _tile_page(config: DecodeConfig) -> dict[str, int]:
    k, v = config.pieces
    tiles = k.row_tiles * k.column_tiles + v.row_tiles * v.column_tiles
    lowest = sum(dequant.register_source(0, 0, r, k.rows, k.bits)[1].exponent == 0 for r in range(REGISTERS))
    loads = sum(piece.column_tiles * piece.column_words // layout.BLOCK_WORDS + 2 * piece.column_pairs
                for piece in config.pieces)  # codes; scales and zero-points of 32 columns
    return {
        "HMMA": tiles,
        "LDS": loads,
        "LOP3": REGISTERS * tiles,  # x & mask | magic, once a register
        "HADD2": lowest * tiles,  # registers whose codes sit in the lowest slot: 1024 + code needs only a subtraction
        "HFMA2": (2 * REGISTERS - lowest) * tiles,  # the other integers, and scale and zero-point of all
        "LDGSTS": _copies(config, k.accesses) + _copies(config, v.accesses),
        "MOVM": 2 * TOKEN_TILES,
    }


def expected_static(config: DecodeConfig) -> dict[str, int]:
    """Static counts of a kernel's SASS."""
    tiles, n = config.tile16_tokens // TILE, config.columns
    fragments = 2 * tiles * config.o_tiles  # of K and V of one 16-bit tile
    part_copies = [_copies(config, piece.accesses) for piece in config.pieces]
    tile_copies = _copies(config, config.tile16_tokens * config.row_accesses)
    if config.has_mixed and tile_copies > load.COPIES_AT_ONCE:  # a loop, and what is left over
        tile_copies = load.COPIES_AT_ONCE + tile_copies % load.COPIES_AT_ONCE
    counts = Counter(per_page(config)) + Counter({
        "HMMA": n * fragments,
        "LDSM": fragments,
        # merge: maximum, sum, one channel of each warp; combine: the flag
        "LDS": 1 + (0 if config.shares_pages else 3 * config.warps),
        "LDG.E.128": combine.SPLITS_AT_ONCE,
        # the first parts; sinks and residual: K, V
        "LDGSTS": sum(part_copies[part % 2] for part in range(config.parts_ahead)) + 4 * tile_copies,
        "MOVM": 2 * tiles * n,
    })
    if config.has_mixed:
        fragments = mixed.own_tiles(config) * config.o_tiles
        counts += Counter(_k_part(config))
        counts += Counter({"HMMA": n * fragments, "LDSM": fragments, "MOVM": 2 * mixed.own_tiles(config) * n,
                           "LDGSTS": _copies(config, config.k.accesses) + mixed.own_chunks(config) * tile_copies})
    if config.path == "register" and config.k.per_token:
        counts["HMMA"] += n * config.o_tiles  # sums of q'
    return dict(counts)
