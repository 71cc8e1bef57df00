"""The register path's arithmetic: raw codes are fp16 subnormals, the A operand of m16n8k16."""
