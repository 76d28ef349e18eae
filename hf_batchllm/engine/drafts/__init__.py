"""Drafts: tokens that are guessed, and run beside the one that they would follow."""
