"""The integer path, up to 4 query rows: the register path's shell around 8-bit multiplies of raw masked bytes.

The 8 columns of an m16n8k32 are (query row, digit): q s and p s enter as 16-bit fixed-point numbers in two digits.
"""
