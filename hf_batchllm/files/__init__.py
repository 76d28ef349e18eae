"""Files in, files out: prompts from a file, results into another, whatever happens in between."""
