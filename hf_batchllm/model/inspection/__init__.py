"""What a model asks of the engine, found out before it runs; what cannot be served is refused here by name."""
