"""Both levels of a cache of levels (LeanKV) in one launch: two page loops of a warp over one softmax state.

    config     what is fixed at compile time, of which caches, and why not of others
    items      the even share of pages of two levels
    decode     the kernel
"""
