"""Images in prompts: read, made into what the model's vision tower takes, and given token ids of their own."""
