"""What all of Hopper's decode kernels share: numbers, the merge of splits."""
