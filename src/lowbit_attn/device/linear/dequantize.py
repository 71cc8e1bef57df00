"""Packed codes of AQLM and GPTVQ to rows of W in 16 bits: a warp decodes a unit of the pack at a time.

Lanes have rows of their own, as the products need it, so that what a lane decodes goes to a tile in shared memory
first: memory gets pieces of rows of 64 bytes or more, whole sectors of L2. Rows ``first`` (in units of the pack) on, as
many as ``out`` [rows, columns of the pack] has; scales of rows included.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from lowbit_attn.device.linear.aqlm12 import entries
from lowbit_attn.device.linear.config import WARP, Chip
from lowbit_attn.device.linear.tables import words_at
from lowbit_attn.device.numbers import ELEMENT

ACCESS_BYTES = 16


class DecodedUnit(NamedTuple):
    """What a warp decodes at once: pieces of rows, a tile of them; several units are a block of rows of the pack."""

    warps: int  # of a CTA, at most
    of_block: int  # units that share block and group
    pieces: int
    piece_bytes: int  # in memory

    @property
    def stride(self) -> int:
        """Bytes of a piece in shared memory: an access more, so that lanes with pieces of their own have banks too."""
        return self.piece_bytes + ACCESS_BYTES

    def warps_on(self, chip: Chip) -> int:
        """Warps whose tiles have room."""
        return min(self.warps, chip.smem_limit // (self.pieces * self.stride))


UNITS = {"aqlm_2x8": DecodedUnit(12, 1, 32, 512), "aqlm_2x12": DecodedUnit(16, 1, 128, 64),
         "gptvq2": DecodedUnit(24, 128, 64, 64)}
FLAT_THREADS = 256  # of aqlm_1x16, whose codes lie in the order of W


class Dequantize:
    """The kernel of a format; scales: fp32 [n], of GPTVQ of any length."""

    def __init__(self, format: str, dtype: str, chip: Chip):
        self.element, self.unit = ELEMENT[dtype], UNITS.get(format)
        self.decode, self.place = {
            "aqlm_2x8": (decode_aqlm_2x8, place_aqlm_2x8), "aqlm_2x12": (decode_aqlm_2x12, place_aqlm_2x12),
            "gptvq2": (decode_gptvq2, place_gptvq2), "aqlm_1x16": (None, None)}[format]
        self.is_row_major = format == "gptvq2"
        self.warps = self.unit.warps_on(chip) if self.unit else FLAT_THREADS // WARP
        self.threads = self.warps * WARP
        self.smem_bytes = self.warps * self.unit.pieces * self.unit.stride if self.unit else 0

    @cute.jit
    def __call__(self, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, first: Int32,
                 blocks: Int32, ctas: Int32, stream):
        kernel = self.flat_kernel if self.unit is None else self.kernel
        kernel(codes, codebooks, scales, out, first, blocks).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, first: Int32,
               blocks: Int32):
        unit = self.unit

        @cute.struct
        class Smem:
            tiles: cute.struct.Align[cute.struct.MemRange[Uint32, self.smem_bytes // 4], 128]

        base = Int32(cutlass.memory.SmemAllocator().allocate(Smem).tiles.data_ptr().toint())
        lane, warp = cute.arch.thread_idx()[0] % WARP, cute.arch.thread_idx()[0] // WARP
        tile = base + warp * (unit.pieces * unit.stride)
        groups = codes.shape[1 if self.is_row_major else 0]
        for i in cutlass.range(cute.arch.block_idx()[0] * self.warps + warp, groups * blocks * unit.of_block,
                               cute.arch.grid_dim()[0] * self.warps, unroll=1):
            inside, place = i % unit.of_block, i // unit.of_block
            block, group = place // groups, place % groups
            self.decode(self.element, codes, codebooks, scales, tile, first, block, group, inside, lane)
            cute.arch.sync_warp()
            accesses = unit.piece_bytes // ACCESS_BYTES  # of a piece
            for j in cutlass.range(lane, unit.pieces * accesses, WARP, unroll=4):
                piece, part = j // accesses, j % accesses
                row, column = self.place(block, group, inside, piece)
                words = cute.make_rmem_tensor(4, Uint32)
                cute.autovec_copy(tile_words(tile + piece * unit.stride + part * ACCESS_BYTES, 4), words)
                at = out.iterator.toint() + (Int64(row) * out.shape[1] + column) * 2 + part * ACCESS_BYTES
                cute.autovec_copy(words, words_at(at))
            cute.arch.sync_warp()

    @cute.kernel
    def flat_kernel(self, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor, out: cute.Tensor,
                    first: Int32, blocks: Int32):
        """Decode aqlm_1x16: a thread has a slice of a row, and neighbours write neighbouring slices."""
        groups = codes.shape[1]
        for item in cutlass.range(cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0], groups * blocks,
                                  cute.arch.grid_dim()[0] * self.threads, unroll=1):
            row, group = item // groups, item % groups
            scale = scale_of(scales, first + row)
            entry = entry_of(codebooks, Int32(codes[first + row, group]))
            at = out.iterator.toint() + (Int64(row) * out.shape[1] + group * 8) * 2
            cute.autovec_copy(rounded(self.element, [value * scale for value in entry]), words_at(at))


def tile_words(address: Int32, count: int) -> cute.Tensor:
    """Words of shared memory, in one access."""
    return cute.make_tensor(cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4 * count),
                            cute.make_layout(count))


def entry_of(codebooks: cute.Tensor, index: Int32, words: int = 4) -> list[Float32]:
    """The numbers of an entry of fp16."""
    values = cute.make_rmem_tensor(2 * words, Float16)
    cute.autovec_copy(words_at(codebooks.iterator.toint() + Int64(index) * (4 * words), words),
                      cute.recast_tensor(values, Uint32))
    return [Float32(values[i]) for i in range(2 * words)]


def rounded(element, values: list[Float32]) -> cute.Tensor:
    """Words of numbers in 16 bits."""
    made, halves = cute.make_rmem_tensor(len(values), Float32), cute.make_rmem_tensor(len(values), element)
    for i, value in enumerate(values):
        made[i] = value
    halves.store(made.load().to(element))
    return cute.recast_tensor(halves, Uint32)


@cute.jit
def scale_of(scales: cute.Tensor, row: Int32) -> Float32:
    """A row's scale; rows of the padding have none."""
    scale = Float32(0.0)
    if row < scales.shape[0]:
        scale = scales[row]
    return scale


@cute.jit
def decode_aqlm_2x8(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                    tile: Int32, first: Int32, block: Int32, group: Int32, inside: Int32, lane: Int32):
    """32 slices of a lane's row."""
    scale = scale_of(scales, (first + block) * WARP + lane)
    start = codes.iterator.toint() + Int64((group * codes.shape[1] + first + block) * 4 * WARP + lane) * 16
    own = tile + lane * UNITS["aqlm_2x8"].stride
    for load in cutlass.range(4, unroll=1):
        words = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(words_at(start + load * (WARP * 16)), words)
        for i in cutlass.range_constexpr(8):
            pair = [Int32((words[i // 2] >> Uint32(16 * (i % 2) + 8 * book)) & Uint32(255)) + 256 * book
                    for book in range(2)]
            low, high = (entry_of(codebooks, index) for index in pair)
            at = own + ((8 * load + i + lane) & 31) * ACCESS_BYTES
            cute.autovec_copy(rounded(element, [(a + b) * scale for a, b in zip(low, high)]), tile_words(at, 4))


def place_aqlm_2x8(block: Int32, group: Int32, inside: Int32, piece: Int32):
    """(row of ``out``, first column) of a piece: 256 columns of a row."""
    return block * WARP + piece, group * 256


@cute.jit
def decode_aqlm_2x12(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                     tile: Int32, first: Int32, block: Int32, group: Int32, inside: Int32, lane: Int32):
    """Four slices of each of a lane's four rows."""
    start = codes.iterator.toint() + Int64((group * codes.shape[1] + first + block) * 3) * (WARP * 16) + lane * 16
    loads = cute.make_rmem_tensor((4, 3), Uint32)
    for i in cutlass.range_constexpr(3):
        cute.autovec_copy(words_at(start + i * (WARP * 16)), loads[None, i])
    for own in cutlass.range_constexpr(4):
        places = [3 * own + i for i in range(3)]
        row = lane * 4 + own
        scale, found = scale_of(scales, (first + block) * 128 + row), entries([loads[i % 4, i // 4] for i in places])
        for i in cutlass.range_constexpr(4):
            low, high = (entry_of(codebooks, Int32(found[2 * i + book] >> Uint32(4)) + 4096 * book)
                         for book in range(2))
            at = tile + row * UNITS["aqlm_2x12"].stride + ((i + lane) & 3) * ACCESS_BYTES
            cute.autovec_copy(rounded(element, [(a + b) * scale for a, b in zip(low, high)]), tile_words(at, 4))


def place_aqlm_2x12(block: Int32, group: Int32, inside: Int32, piece: Int32):
    """(row of ``out``, first column) of a piece: 32 columns of a row."""
    return block * 128 + piece, group * 32


@cute.jit
def decode_gptvq2(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                  tile: Int32, first: Int32, block: Int32, group: Int32, inside: Int32, lane: Int32):
    """Eight slices of four columns of two rows: piece 4 row + t of the tile."""
    g, t = lane >> 2, lane & 3
    segment = (first + block) * codes.shape[1] + group
    words = cute.make_rmem_tensor(4, Uint32)
    at = (Int64(segment) * 128 + inside) * WARP + lane
    cute.autovec_copy(words_at(codes.iterator.toint() + at * 16), words)
    for half in cutlass.range_constexpr(2):
        own = tile + (4 * (8 * half + g) + t) * UNITS["gptvq2"].stride
        for j in cutlass.range_constexpr(0, 8, 2):
            found = [Int32((words[j // 2] >> Uint32(16 * i + 8 * half)) & Uint32(255)) for i in range(2)]
            pair = [entry_of(codebooks, (segment * 256 + code) * 4 + t, 2) for code in found]
            cute.autovec_copy(rounded(element, pair[0] + pair[1]), tile_words(own + 8 * j, 4))


def place_gptvq2(block: Int32, group: Int32, inside: Int32, piece: Int32):
    """(row of ``out``, first column) of a piece: 32 columns of a row in one of four tiles."""
    return block * 256 + inside // 8 * 16 + piece // 4, group * 1024 + piece % 4 * 256 + inside % 8 * 32
