"""What a kernel of codebook weights is, before it is built. Without the DSL.

    hadamard-digits     x to Hadamard coefficients in 16-bit fixed point, in the order of the product's B operand
    hadamard-rotate     x to Hadamard coefficients in 16 bits
    hadamard-output     the product's coefficients to y
    kronecker-digits    the same as hadamard-digits of some sizes, for few rows; ``rows`` of the key: columns of a part
    kronecker-output    the same as hadamard-output
    gemv                the product of up to ``rows`` rows of x with packed codes
    gemv-vector         the same of e8p with hadamard-digits inside, for few rows and columns
    dequantize          packed codes to rows of 16-bit weights
    sum                 partial sums to y

Where a row's CTAs are no cluster, which Hopper alone has, or clusters are many, two launches make digits:

    kronecker-coefficients  x to Hadamard coefficients in fp32; ``rows`` of the key as of kronecker-digits
    wide-coefficients       the same of more sizes
    wide-output             as kronecker-output, of more sizes
    fixed-digits            coefficients in fp32 to digits, any size
"""

from dataclasses import dataclass

from lowbit_attn.kernels.key import SMEM_LIMIT_BYTES, Checks, KernelKey
from lowbit_attn.kernels.linear import KRONECKER_ROWS, VECTOR_COLUMNS, VECTOR_SIZE
from lowbit_attn.linear.layouts import ceil_to

WARP = 32
TABLE_AT = 1024  # shared address of tables: where dynamic shared memory starts, so that byte 1 of an address is a code
ROW_BYTES, HALF_ROW = 256, 128  # of a table
TABLE_BYTES = 256 * ROW_BYTES  # a row an entry
SELECT = 0x5504  # of PRMT: byte 0 of the lane's offset, a byte of the codes, zeros
DIGIT_MAX = 32_512  # of a coefficient: 256 * 127, the largest whose two digits are signed bytes
SMALLEST = 2.0**-100  # of a largest coefficient: below it a row counts as zeros
HADAMARD_THREADS = 512
TABLE_THREADS = 512  # of kernels with a table of products
ALIGN = 128  # of parts of shared memory
KRONECKER_PAD = 4  # words behind a row in shared memory
VECTOR_HALVES = 2  # of the transform inside a product: eight rows of its result each
COLUMNS = 4  # rows of x in one MMA: each has two digits


@dataclass(frozen=True)
class Chip:
    """What a kernel may use where it runs. Hopper has clusters, lets kernels start before the one ahead of them has
    ended, and its shared memory that a launch asks for starts at TABLE_AT; elsewhere it may start at 0."""

    is_hopper: bool
    smem_limit: int  # bytes that a CTA may have

    @property
    def before_tables(self) -> int:
        """Bytes that a launch asks for so that there are tables' bytes from TABLE_AT on."""
        return 0 if self.is_hopper else TABLE_AT


def chip_of(key: KernelKey) -> Chip:
    """Where a kernel runs, or is made as if it ran there; sm_90: Ampere's kernels on a Hopper chip."""
    return Chip(key.target == "sm_90a", SMEM_LIMIT_BYTES[key.sizes or key.target])


@dataclass(frozen=True)
class GemvConfig:
    """The product kernel of E8P. A CTA has rows of W; its warps take chunks of 128 columns in turn."""

    stages: int  # codes of a vector of 8: 1 or 2
    rows: int  # of x: a multiple of COLUMNS
    chip: Chip
    has_transform: bool = False  # the kernel makes x's digits itself, in shared memory

    @property
    def column_blocks(self) -> int:
        return self.rows // COLUMNS

    @property
    def warps(self) -> int:
        return 16

    @property
    def blocks(self) -> int:
        """Row blocks of W that a warp has at once: x's digits are loaded once for all of them."""
        return 4 if self.column_blocks <= 2 else 2

    @property
    def accumulators(self) -> int:
        """Accumulators of a product: of even and odd fields; or one, odd fields shifted, where registers lack."""
        return 2 if self.column_blocks == 1 else 1

    @property
    def block_rows(self) -> int:
        """Rows of W in one MMA, of two stages each."""
        return 16 // self.stages

    @property
    def phase_blocks(self) -> int:
        """Row blocks whose sums are in shared memory at once."""
        return 32 if self.column_blocks <= 2 else 16

    @property
    def sums(self) -> int:
        """Integers of a phase: by row of an MMA, row of x and digit."""
        return self.phase_blocks * 16 * self.rows * 2

    @property
    def digits_at(self) -> int:
        """Shared address of x's digits, if the kernel makes them, behind tables, sums and the sums of digits."""
        return TABLE_AT + ceil_to(TABLE_BYTES + 4 * (self.sums + 2 * self.rows), ALIGN)

    @property
    def values_at(self) -> int:
        """Shared address of what is transformed and, behind it, of a note of each warp."""
        return self.digits_at + VECTOR_SIZE * COLUMNS * 2

    @property
    def smem_bytes(self) -> int:
        if not self.has_transform:
            return self.chip.before_tables + TABLE_BYTES + 4 * (self.sums + 2 * self.rows)
        values = 4 * VECTOR_HALVES * KRONECKER_ROWS * (VECTOR_COLUMNS + KRONECKER_PAD)
        return self.chip.before_tables + self.values_at - TABLE_AT + ceil_to(values + 4 * self.warps, ALIGN)


def checks(key: KernelKey) -> Checks:
    """What the SASS of such a kernel must show."""
    if key.variant.startswith("gemv") and key.format.startswith("e8p"):
        return Checks(need=("IMMA", "LDS", "PRMT"))
    if key.variant == "gemv":
        return Checks(need=("LDS",) if key.format == "aqlm_2x12" else ("LDS", "PRMT"))
    return Checks()
