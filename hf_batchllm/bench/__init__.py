"""How fast the library is on a list of prompts with shared prefixes, beside what transformers has itself.

python -m hf_batchllm.bench --help    beside model.generate at its best batch size, generate_batch, and the floor

Every contender gets the same prompts and the length of each answer. EOS is ignored, so all make as many tokens.
"""
