"""From a file of prompts to a file of results. A run that was stopped in any way can continue.

``run_file`` is the door for a model object, the command ``hf-batchllm run`` the door for a file's name; ``record_loop``
runs both:

    with open_source("in.jsonl") as source, open_output("out.jsonl", layout=RESULT_LAYOUT, source=source) as output:
        record = output.begin(RunRecord(settings=...), source)  # refuses changed settings and a changed input
        for window in source.windows(output.missing()):
            for number, raw in zip(window.tolist(), source.records(window)):
                output.append([(number, line)])  # bytes of one JSON object with "index" and "key"
        output.finish(order="input", figures={...})

``store`` holds bytes on the disk and never asks what a line means; ``records`` knows what lines mean. Neither needs
torch, except ``records.line_configs``.
"""
