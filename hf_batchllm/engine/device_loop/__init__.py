"""Steps launched before the host has seen the tokens of earlier ones: seats, bursts and CUDA graphs."""
