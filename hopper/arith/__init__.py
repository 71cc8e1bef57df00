"""How a warp multiplies packed pages: in fp16, on raw codes as subnormals, or in int8, by digits."""
