"""From logits to tokens, and what ends a sequence."""
