"""What people pass in, checked: models, prompts, chats, tensors, tokenizers, adapters, seeds, options."""
