"""States that layers carry from token to token: their memory, and their part in a batch."""
