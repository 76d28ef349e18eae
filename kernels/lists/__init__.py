"""What kernels are told of their work, made on the host."""
