"""One list of prompts on several GPUs: processes with a whole model each, which share the list by its prefixes."""
