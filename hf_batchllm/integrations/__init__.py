"""Doors into transformers: accelerated(model), accelerated(pipe) and pipeline(...)."""
