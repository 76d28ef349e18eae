"""The command's words for a chat template's options: a line's are not those of the flag."""

from __future__ import annotations

from hf_batchllm.cli.arguments import run_parser
from hf_batchllm.cli.flag_names import in_flags


def test_a_lines_option_is_not_said_to_be_the_flags() -> None:
    given = ["in.jsonl", "out.jsonl", "--model", "m", "--chat-template-kwargs", '{"thinkin": false}']
    put = in_flags(run_parser().parse_args(given))
    assert (
        put("`thinkin` in `chat_template_kwargs` has no effect") == "`thinkin` in --chat-template-kwargs has no effect"
    )
    of_a_line = "`enable` in `chat_template_kwargs` has no effect"
    assert put(of_a_line) == of_a_line
