"""What each kernel computes, in plain PyTorch: the reference that it is tested against."""
