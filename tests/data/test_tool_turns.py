"""What a chat template puts between a turn that calls tools and the next one."""

import pytest

from examples.make_tool_model import EOS, TOOL, TURN, tool_tokenizer
from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.data.tool_turns import ToolTurns

# earlier turns lose their content once there is a later one, and answers of one turn share a frame
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last %}={% endif %}{{ m.content }}<eos>/"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}*{% endif %}{{ m.content }}"
    "{% if loop.last %}*{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}<turn>"
)


def test_answers_are_what_comes_after_a_turn() -> None:
    tokenizer = tool_tokenizer()
    text = tokenizer.decode(ToolTurns(MegatronConfig(), tokenizer, []).ids(["12", "34"]))
    assert text == f"{TOOL}12{TOOL}34{TURN}"


def test_earlier_turns_may_be_written_otherwise() -> None:
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = FORGETFUL
    text = tokenizer.decode(ToolTurns(MegatronConfig(), tokenizer, []).ids(["12", "34"]))
    assert text == f"/*1234*{TURN}", "what follows the end of a turn is there, its end is not twice"
    assert EOS not in text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "does not write messages",
        ),
        ("{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}", "does not write a turn"),
        ("{{ raise_exception('no tools') }}", "refuses an answer of a tool"),
    ],
)
def test_templates_without_tools_are_refused(template: str, message: str) -> None:
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        ToolTurns(MegatronConfig(), tokenizer, [])
