"""Names the kernels that sum rows over the GPUs of a host: which widths they serve, and how a CTA shares a row."""

from lowbit_attn.kernels.key import KernelKey

DTYPES = ("float16", "bfloat16")
SUM, ADD_NORM = VARIANTS = ("sum", "add_norm")  # ADD_NORM: added to a residual, and its RMSNorm
WARP, MOST_THREADS, MOST_WORDS = 32, 1024, 6  # words of two numbers, of a thread: eight spill its registers


def words_a_thread(width: int) -> int | None:
    """Words that a thread does of a row of so many numbers, so that whole warps share it; None: it is not served."""
    words = width // 2
    return next((each for each in range(1, MOST_WORDS + 1) if words and words % (WARP * each) == 0
                 and words // each <= MOST_THREADS), None) if width % 2 == 0 else None


def missing(width: int, dtype: str) -> list[str]:
    """Why no kernel sums such rows; empty if one does."""
    return [reason for is_wrong, reason in (
        (dtype not in DTYPES, f"{dtype}: supported: {', '.join(DTYPES)}"),
        (words_a_thread(width) is None, f"rows of {width} numbers: supported: multiples of 64 that at most "
                                        f"{MOST_THREADS} threads share in up to {MOST_WORDS} words each"),
    ) if is_wrong]


def all_reduce_key(target: str, dtype: str, width: int, variant: str = SUM) -> KernelKey:
    """Hopper's kernel that sums rows of so many numbers over the GPUs of a host."""
    return KernelKey("all_reduce", "hopper", target, dtype, 0, "", f"{variant}-{width}")


def parsed(key: KernelKey) -> tuple[str, int]:
    """(variant, width) of such a key."""
    variant, width = key.variant.split("-")
    return variant, int(width)
