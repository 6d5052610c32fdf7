"""What follows a turn in which a model called tools: their answers, and the beginning of its next turn, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.data.chat import read_template, render

_TURN = "a turn that calls tools"  # stands for the generated one, whose tokens are never made again


class ToolTurns:
    """Tokens of tools' answers, as the chat template writes them.

    They are the text that the template puts after a turn of the assistant. What it writes before does not matter, so
    that templates which write earlier turns otherwise once there are later ones are no problem.

    Args:
        actor: says which template.
        schemas: of the tools, as for prompts.

    Raises:
        DataError: the template cannot be read, or does not write what a tool answers.
    """

    def __init__(self, actor: MegatronConfig, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]):
        self.tokenizer, self.schemas, self.kwargs = tokenizer, list[Any](schemas), actor.chat_template_kwargs
        self.template = read_template(actor.chat_template)
        answers = ["the first answer", "the second answer"]
        text = self._text(answers)
        if not all(answer in text for answer in answers):
            raise DataError("the chat template does not write messages of the role tool, as tools_config.tools needs")

    def ids(self, answers: Sequence[str]) -> list[int]:
        """Of the answers to a turn's calls, up to where the next turn begins. The turn has its end token already."""
        ids: list[int] = self.tokenizer(self._text(answers), add_special_tokens=False)["input_ids"]
        return ids

    def _text(self, answers: Sequence[str]) -> str:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        messages += [{"role": "tool", "content": answer} for answer in answers]
        refusal = "the chat template refuses an answer of a tool"
        settings = {"tools": self.schemas, "add_generation_prompt": True, **self.kwargs}
        text = render(self.tokenizer, messages, self.template, refusal, **settings)
        _, turn, added = text.partition(_TURN)
        if not turn:
            raise DataError("the chat template does not write a turn of the assistant, as tools_config.tools needs")
        return added.removeprefix(str(self.tokenizer.eos_token))
