"""The tile path (BitDecoding section 4): warpgroups in roles dequantize pages to 16-bit tiles for WGMMA."""
