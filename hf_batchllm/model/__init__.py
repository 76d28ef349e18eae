"""The user's model: whether it can be served, its attention backend, the batch, the storage of K and V, one step."""
