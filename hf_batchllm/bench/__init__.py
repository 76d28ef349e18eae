"""How fast the library is on a list of prompts with shared prefixes, beside what transformers has itself.

python -m hf_batchllm.bench --help
"""
