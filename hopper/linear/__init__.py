"""Linear layers over codebook weights: x to digits, the products, and what follows them."""
