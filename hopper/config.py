"""What a decode kernel of one of the paths is, before it is built: its checks, and blocks of it that an SM holds."""

from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper.arith.fp16 import counts as register
from lowbit_attn.hopper.arith.int8 import config as integer
from lowbit_attn.hopper.tile import config as tile
from lowbit_attn.kernels import Checks


def ctas_per_sm(key) -> int:
    """Blocks of a decode kernel that an SM surely holds at once."""
    return integer.KINDS[key.variant].ctas_per_sm if key.variant in integer.KINDS else 1


def checks(fmt: Format, head_dim: int, target: str = tile.TARGET, path: str = "tile", rows: int = tile.COLUMNS,
           dtype: str = "float16", features: tuple[str, ...] = ()) -> Checks:
    """What the SASS of the decode kernel of a path must show."""
    if path in integer.KINDS:
        return integer.checks(fmt, head_dim, dtype, rows, features, path)
    if path == "register":
        return register.checks(fmt, head_dim, dtype, rows, features)
    cfg = tile.make_config(fmt, head_dim, dtype, rows, features)
    return Checks(tile.SASS_NEED, tile.SASS_FORBID, tuple(tile.expected_counts(cfg).items()), cfg.smem_bytes)
