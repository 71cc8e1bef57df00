"""A warp that owns its pages from their copies to the merge, whatever its arithmetic and its schedule."""
