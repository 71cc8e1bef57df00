"""The path whose unpacked codes are WGMMA's A operand in registers: nothing is written back to shared memory."""
