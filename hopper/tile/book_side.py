"""A side in codes of a codebook on the tile path: what its lanes look up, and where that lies in its tile.

Its tile is [128 tokens, head_dim channels] for K and for V, in atoms of 64 channels with the 128-byte swizzle. WGMMA
reads it K-major as K, and with channels contiguous (MN-major) as V: the channels of a code lie side by side in both.

A lane asks for the codes of its words (formats/codebook_order.py) in an order of its own. So lanes that look up an
entry at once ask different banks of the codebook, and their stores go to different banks of the tile.
"""

from dataclasses import dataclass

from lowbit_attn import layout
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.formats.spec import SideSpec

ATOM = 64  # channels of a row of the swizzle's atom
ATOM_BYTES = 128  # of such a row
EIGHT_BYTES = 8 * ATOM_BYTES  # of eight tokens, over which the swizzle repeats
TABLE_BYTES = order.ENTRIES * order.BOOK_ROW_BYTES  # of a side's codebook
QUAD = 4  # groups that lanes t = 0 .. 3 ask for, and codes in a word
BLOCK_TOKENS = {False: 8, True: 16}  # of a lane's words of K and of V: by ``transposed``


@dataclass(frozen=True)
class BookTile(SideSpec):
    """One side of a record in codes of a codebook."""

    @property
    def tile_bytes(self) -> int:
        """Bytes of the dequantized 16-bit tile."""
        return layout.PAGE_TOKENS * self.head_dim * 2

    @property
    def tile_rows(self) -> int:
        return layout.PAGE_TOKENS

    @property
    def atom_chunks(self) -> int:
        return ATOM_BYTES // order.RUN

    @property
    def groups(self) -> int:
        """Groups of channels that share a code."""
        return self.head_dim // self.group_size

    @property
    def entry_bytes(self) -> int:
        return 2 * self.group_size

    @property
    def atoms(self) -> int:
        """K: atoms of 64 channels, or pairs of them where a lane has fewer codes of one than a word."""
        return self.groups // (QUAD * self.steps)

    @property
    def runs(self) -> int:
        """Runs of 512 bytes of codes, of each of which a lane has 16 consecutive ones."""
        return layout.PAGE_TOKENS * self.groups // (order.LANES * order.RUN)

    @property
    def blocks_a_run(self) -> int:
        """Blocks of 8 tokens (K) or 16 (V) of which a lane's 16 codes are; of V they may be a part of one's groups."""
        return max(1, order.RUN * order.LANES // (BLOCK_TOKENS[self.transposed] * self.groups))

    @property
    def parts_a_block(self) -> int:
        """V: runs that a block of 16 tokens takes."""
        return max(1, BLOCK_TOKENS[self.transposed] * self.groups // (order.RUN * order.LANES))

    @property
    def rotations(self) -> int:
        """R of codebook_order: groups of V that a lane g and all t ask for, in turn."""
        return min(4, self.groups // (8 if self.transposed else 4))

    @property
    def steps(self) -> int:
        """K: codes of a lane in an atom of a block. V: codes of a lane, token and part of a block."""
        return self.rotations if self.transposed else max(QUAD, ATOM // self.group_size // QUAD)

    def key_quad(self, step, g):
        """K: which quad of an atom's groups a lane of this g asks for in a step.

        For all steps both this and ``key_quad ^ g``, its place in the swizzle, differ between the lanes g that an
        access serves at once: of two words four, else all eight, where g is multiplied by a root of GF(8).
        """
        if self.steps == QUAD:
            return step ^ (g % 4)
        low, middle, high = g % 2, g // 2 % 2, g // 4
        return step ^ (4 * middle + 2 * (low ^ high) + high)

    def key_byte(self, step, g):
        """K: byte, of a lane's words of a block and atom, with the code of ``key_quad``."""
        quad = self.key_quad(step, g)
        return quad // 4 * 4 + (quad % 4 + 4 - g % 4) % 4

    def key_group(self, step, g, t):
        """K: group, within an atom, of a step."""
        return QUAD * self.key_quad(step, g) + t

    def value_group(self, step, g, t):
        """V: group, within a part of a block, of a step."""
        return self.rotations * g + (step ^ (t % self.rotations))

    def value_word(self, step, t):
        """V: word, of a lane's words of a block, with the codes of ``value_group``."""
        return ((step ^ (t % self.rotations)) + self.rotations - t % self.rotations) % self.rotations

    def entry_offset(self, group, t=0):
        """Offset, in a row of the codebook, of a group's entry; V's lanes t = 2, 3 take a second copy if R = 2, where a
        row has one."""
        offset = self.entry_bytes * group
        if self.transposed and self.rotations == 2 and self.groups * self.entry_bytes < order.BOOK_ROW_BYTES:
            second = order.BOOK_ROW_BYTES // 2 + order.BOOK_ROW_BYTES // 4
            return offset ^ (t // 2 * second)
        return offset

    def place(self, token, channel):
        """Byte of a token and channel in the tile."""
        row, col = token % 8, channel % ATOM * 2
        chunk = (col // order.RUN) ^ row
        return (channel // ATOM * (layout.PAGE_TOKENS * ATOM_BYTES) + token // 8 * EIGHT_BYTES + row * ATOM_BYTES
                + chunk * order.RUN + col % order.RUN)
