"""One step of the user's model: the packed batch, the attention backends, the storage of K and V, the runner."""
