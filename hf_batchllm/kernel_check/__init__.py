"""Kernels are tried against their PyTorch twins before they are trusted on a card that nobody has tried."""
