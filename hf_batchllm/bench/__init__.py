"""How fast the library is on a list of prompts with shared prefixes, beside what transformers has itself.

python -m hf_batchllm.bench --help            whole lists, beside model.generate and model.generate_batch
python -m hf_batchllm.bench.score --help      scoring, beside a plain loop over batches
python -m hf_batchllm.bench.harness --help    the evaluation harness, beside its own hf model
python -m hf_batchllm.bench.plot              pictures of the figures that --json has written
"""
