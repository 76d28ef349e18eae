"""Kernels are tried against their PyTorch references before they are trusted on a card that nobody has tried."""
