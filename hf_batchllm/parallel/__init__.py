"""Processes that have one model together, each a part of its weights: one leads, and the others follow."""
