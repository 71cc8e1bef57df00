"""Codebook caches, up to 4 query rows: every lookup is one PRMT and one load of shared memory without bank conflicts."""
