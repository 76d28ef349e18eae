"""From a file of prompts to a file of results, surviving whatever may happen in between.

    with open_source("in.jsonl") as source, open_output("out.jsonl", source=source) as output:
        record = output.begin(RunRecord(settings=...), source)  # refuses settings or an input that have changed
        for window in source.windows(output.missing()):
            for number, raw in zip(window.tolist(), source.records(window)):
                output.append([(number, line)])  # bytes of one JSON object with "index" and "key"
        output.finish(order="input", figures={...})

``sources`` reads (``tables`` makes JSON lines of CSV and Parquet, ``windows`` cuts what does not fit into memory).
``outputs`` writes (``journal``: lines, appended as they finish; ``run_record``: how they were made; ``locks``).
Nothing here imports torch.
"""
