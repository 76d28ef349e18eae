"""The user's model: whether it can be served, the backend for its device, the batch, the storage of K and V, one step."""
