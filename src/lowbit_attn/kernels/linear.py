"""Names the kernels of codebook weights: of which formats, rows of x and dtypes there are some."""

from itertools import product

from lowbit_attn.kernels.key import SMEM_LIMIT_BYTES, KernelKey
from lowbit_attn.linear.formats import NAMES

E8P = ("e8p2", "e8p4")  # with Hadamard transforms on both sides
# rows of x in one launch
ROWS = {"e8p2": (4, 8, 16), "e8p4": (4, 8, 16), "gptvq2": (4,), "aqlm_2x8": (1,), "aqlm_2x12": (1,)}
MOST_ROWS = 64  # of x that product kernels take, launch by launch
# rows up to which those launches are faster than chunks of W in 16 bits and cuBLAS: see docs/weights.md
CROSSOVER = {"e8p2": 48, "e8p4": 48, "gptvq2": 16, "aqlm_2x8": 8, "aqlm_2x12": 4}
DTYPES = ("float16", "bfloat16")
PRODUCT_DTYPES = {"gptvq2": ("float16",)}  # of x in product kernels, where they are fewer than DTYPES
TRANSFORMS = ("digits", "rotate", "output")
HADAMARD_LIMIT = 8192  # coefficients of a transform that a CTA has, of a cluster too
ALONE_LIMIT = 11_008  # the same where there are no clusters: 172 x 64, of models' sizes the longest that is no product
KRONECKER = (256, 512)  # columns of what a faster kernel transforms as a Kronecker product
KRONECKER_ORDER, KRONECKER_ROWS = 64, 8  # its rows, at most, and those of a CTA
WIDE = (512, 256, 128, 64)  # columns of one with more rows or fewer columns, the first that fits
WIDE_BATCH = 32  # of its rows, that are multiplied at once
WIDE_ORDER, WIDE_SIZE = 256, 2048  # its rows at most; coefficients from which it is faster than one CTA
VECTOR_ROWS = 1  # of x, at most, whose transform is inside the product: with two it is no faster, with four slower
VECTOR_COLUMNS, VECTOR_SIZE = 256, 4096  # of its Kronecker product; its coefficients at most
VECTOR_BYTES = 160 << 10  # of shared memory: that product takes less
FIXED_PARTS = 8  # CTAs that make the digits of a row of coefficients
CLUSTER_LOG2 = 3  # of the CTAs that share a row of a long transform


def has_clusters(target: str) -> bool:
    """Whether CTAs share a row of a transform; where they do not, long transforms are two launches."""
    return target == "sm_90a"


def hadamard_limit(has_clusters: bool) -> int:
    """Coefficients of a transform that a CTA has at most."""
    return HADAMARD_LIMIT if has_clusters else ALONE_LIMIT


def has_vector(target: str) -> bool:
    """Whether there is room in shared memory for the product with the transform of x inside."""
    return SMEM_LIMIT_BYTES[target] >= VECTOR_BYTES


def linear_key(target: str, variant: str, format: str = "", dtype: str = "float32", rows: int = 0,
               sizes: str = "") -> KernelKey:
    """A kernel of codebook weights, of what device/linear/config.py lists; dtype: of x and y, or fp32 for any."""
    return KernelKey("linear", "device", target, dtype, 0, format, variant, rows=rows, sizes=sizes)


def linear_keys(target: str) -> list[KernelKey]:
    """All kernels of codebook weights."""
    keys = [linear_key(target, f"hadamard-{kind}", "", dtype) for kind, dtype in product(TRANSFORMS, DTYPES)]
    keys += [linear_key(target, f"kronecker-{kind}", "", dtype, columns)
             for kind, dtype, columns in product(("digits", "coefficients", "output"), DTYPES, KRONECKER)]
    keys += [linear_key(target, f"wide-{kind}", "", dtype, columns)
             for kind, dtype, columns in product(("coefficients", "output"), DTYPES, WIDE)]
    keys += [linear_key(target, "fixed-digits")]
    keys += [linear_key(target, "gemv-vector", name, dtype, ROWS[name][0]) for name, dtype in product(E8P, DTYPES)
             if has_vector(target)]
    keys += [linear_key(target, "sum", "", dtype) for dtype in DTYPES]
    for name in NAMES:
        dtypes = ("float32",) if name in E8P else DTYPES
        keys += [linear_key(target, "dequantize", name, dtype) for dtype in dtypes]
        keys += [linear_key(target, "gemv", name, dtype, rows) for dtype in dtypes for rows in ROWS.get(name, ())
                 if dtype in PRODUCT_DTYPES.get(name, dtypes)]
    return keys
