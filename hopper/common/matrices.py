"""The 8x8 matrices of 16-bit values that ldmatrix and stmatrix bring to the lanes of a warp, four at a time."""

CHUNK = 8  # 16-bit values in 16 bytes: one row of an 8x8 matrix, the unit of the swizzles


def matrix_place(matrix):
    """(row8, col8) within a 16x16 tile of the 8x8 matrix that register ``matrix`` of a x4 access holds."""
    return matrix % 2, matrix // 2


def lane_place(lane):
    """(row within a 16x16 tile, col8) of the 16 bytes that ``lane`` addresses in a x4 access."""
    row8, col8 = matrix_place(lane // 8)
    return 8 * row8 + lane % 8, col8
