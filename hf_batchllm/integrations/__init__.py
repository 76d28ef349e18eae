"""Doors into transformers: accelerated(model) and accelerated(pipe)."""
