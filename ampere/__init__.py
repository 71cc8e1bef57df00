"""Kernels for SM80 and SM89 in TileLang."""
