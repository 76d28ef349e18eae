"""How the attention layers of the user's model read K and V of the cache: a backend for each way."""
