"""Load role: one warp for K and one for V bring packed parts and 16-bit rows into the rings of all MMA groups.

Tiles of the walk go to the groups in turn, tile n to group n % groups, as fill n // groups of its rings while tiles are
pages; each 16-bit tile then takes UNITS fills.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.hopper.common.tuning import PASSING_BYTES
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import TILE_N, UNITS, WARP, WORD
from lowbit_attn.hopper.tile.load import UNIT_WORDS, Source, load_token_tile
from lowbit_attn.hopper.tile.ring import StageRing
from lowbit_attn.hopper.tile.walk import TileWalk
from lowbit_attn.hopper.wgmma.config import OperandSide, WgmmaConfig


def ring_of(cfg: WgmmaConfig, all_rings: StageRing, group: Int32) -> StageRing:
    """The ring of an MMA group."""
    first = group * cfg.packed_stages
    return StageRing(all_rings.full + first, all_rings.empty + first, cfg.packed_stages)


def smem_of(cfg: WgmmaConfig, side: OperandSide, smem: cute.Pointer, group: Int32) -> cute.Pointer:
    """Its shared memory, uint32."""
    words = cfg.packed_stages * cfg.stage_bytes(side) // WORD
    return cute.make_ptr(Uint32, (smem + group * words).toint(), cute.AddressSpace.smem, assumed_align=128)


def pages_of(cfg: WgmmaConfig, walk: TileWalk, group: Int32) -> Int32:
    """Pages of an MMA group."""
    return (walk.num_pages - group + (cfg.mma_groups - 1)) // cfg.mma_groups


def first_fill(cfg: WgmmaConfig, walk: TileWalk, group: Int32, n: Int32) -> Uint32:
    """Fill of the first piece of 16-bit tile n, counted with the pages, which is this group's."""
    pages = pages_of(cfg, walk, group)
    return Uint32(pages + (n // cfg.mma_groups - pages) * UNITS)


def policy_of(cfg: WgmmaConfig, walk: TileWalk, row_blocks: Int32) -> Int32:
    """L2's policy for this CTA's pages, as if all sequences were as long as its own (warp/fetch.py says why)."""
    blocks, batch, _ = cute.arch.grid_dim()
    most = PASSING_BYTES // (cfg.k.nbytes + cfg.v.nbytes)
    passes = (walk.ring_start // TILE_N * blocks * batch <= most) & (row_blocks == 1)
    return cutlass.select_(passes, Int32(ptx.EVICT_FIRST), Int32(ptx.EVICT_UNCHANGED))


@cute.jit
def run(cfg: cutlass.Constexpr[WgmmaConfig], side: cutlass.Constexpr[OperandSide], src: Source, walk: TileWalk,
        packed: StageRing, packed_smem: cute.Pointer, policy: Int32):
    """All tiles of the walk; a lane looks up the page id of every 32nd page, 32 pages ahead at a time.

    policy: L2's for pages, high word.
    """
    lane = cute.arch.lane_idx()
    head = src.pool.iterator.toint() + Int64(src.head_idx) * Int64(src.head_stride) * (UNIT_WORDS * WORD)
    page_id, group, fill = Int32(0), Int32(0), Uint32(0)
    for i in cutlass.range(walk.num_pages, unroll=1):
        if i % WARP == 0:
            if i + lane < walk.num_pages:
                page_id = src.table[src.table_start + walk.first_page + i + lane]
        unit = Int64(cute.arch.shuffle_sync(page_id, i % WARP)) * Int64(src.page_stride)
        record = head + unit * (UNIT_WORDS * WORD) + side.start
        ring = ring_of(cfg, packed, group)
        slot = rings.stage(ring, fill)
        target = smem_of(cfg, side, packed_smem, group).toint() + slot * cfg.stage_bytes(side)
        rings.wait_empty(ring, fill)
        with cute.arch.elect_one():
            rings.expect(ring, fill, side.nbytes)
            ptx.bulk_copy(target, record, side.nbytes, (ring.full + slot).toint(), policy)
        group += 1
        if group == cfg.mma_groups:
            group, fill = Int32(0), fill + Uint32(1)
    for i in cutlass.range(walk.token_tiles, unroll=1):
        n = walk.num_pages + i
        group = n % cfg.mma_groups
        load_token_tile(cfg, side, src, walk, ring_of(cfg, packed, group), smem_of(cfg, side, packed_smem, group), lane,
                        i, first_fill(cfg, walk, group, n))
