"""The register path (design notes: raw integer codes as the A operand): one warp owns its pages from load to merge."""
