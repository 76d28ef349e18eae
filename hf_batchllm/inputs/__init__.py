"""What people pass in, checked: prompts, chats, tensors, tokenizers, adapters, seeds, options, lengths."""
