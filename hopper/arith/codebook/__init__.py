"""Codebook caches, up to 8 query rows: every lookup is one PRMT and one load of shared memory."""
