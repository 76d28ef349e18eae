"""From a file of prompts to a file of results. A run that was stopped in any way can continue.

``run_file`` is the door for a model object, the command ``hf-batchllm run`` the door for a model's name, and
``run_records`` runs both. ``docs/rooms/files.md`` says what each module does.
"""
