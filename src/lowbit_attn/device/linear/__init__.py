"""Linear layers over codebook weights in CuTe-DSL, for SM90 and SM80/89: ``config.Chip`` says what differs."""
