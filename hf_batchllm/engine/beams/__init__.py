"""Beam search: its loop, its scheduler and its rules."""
