"""Responses of several turns: the model calls tools, reads their answers, and goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.tokenizer import actor_tokenizer
from mindspeed_rl.data.tool_turns import ToolTurns
from mindspeed_rl.engine.base import Generation, GenerationEngine, GenerationRequest
from mindspeed_rl.tools.calls import find_calls
from mindspeed_rl.tools.toolbox import CallStatus, ToolAnswer, Toolbox, load_tools
from mindspeed_rl.types import ToolUse
from mindspeed_rl.workers.control import ControlGroup

SECONDS_BETWEEN_LOOKS = 0.1  # for answers, while no turn is generated


@dataclass(frozen=True)
class Conversation(Generation):
    """A whole response. Tokens that tools answered have the log-prob 0."""

    mask: list[float] = field(default_factory=list)  # of each token: 1 generated, 0 from a tool
    tool_use: ToolUse = field(default_factory=ToolUse)


@dataclass
class _Dialogue:
    """A response on its way."""

    request: GenerationRequest  # for its first turn
    so_far: Conversation
    numbers: list[int] = field(default_factory=list)  # of the calls that it waits for; on the leader
    answers: dict[int, ToolAnswer] = field(default_factory=dict)


class AgentLoop:
    """Drives an engine through responses of several turns.

    Every rank of an engine does the same; its leader runs the tools and shares their answers.

    Args:
        config: the run's.
        engine: of these ranks.
        group: these ranks.
    """

    def __init__(self, config: Config, engine: GenerationEngine, group: ControlGroup):
        self.cfg, self.longest = config.tools_config, config.longest_response
        self.longest_turn = config.generate_config.sampling_config.max_tokens
        self.engine, self.group = engine, group
        self.tokenizer = actor_tokenizer(config, str(config.actor.load))
        tools = load_tools(self.cfg)
        self.turns = ToolTurns(config.actor, self.tokenizer, [tool.schema for tool in tools.values()])
        self.toolbox = Toolbox(self.cfg) if group.is_leader else None
        self._open: dict[int, _Dialogue] = {}  # by row
        self._waiting: set[int] = set()  # rows that wait for tools

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Conversation]]:
        """As `GenerationEngine.generate`, with whole responses; yields while it waits for tools, too."""
        for request in requests:
            self._open[request.row] = _Dialogue(request, Conversation(request.row, [], [], None))
        following = list(requests)
        while self._open:
            for turns in self.engine.generate(following):
                finished = [each for turn in turns if (each := self._take(turn))]
                following, ended = self._answered(0.0)
                self.engine.add(following)
                yield finished + ended
            following, ended = self._answered(SECONDS_BETWEEN_LOOKS)
            yield ended

    def _take(self, turn: Generation) -> Conversation | None:
        """Have a turn's calls run; the response, if it ends with it."""
        dialogue = self._open[turn.row]
        use = dialogue.so_far.tool_use
        with_turn = replace(use, turns=use.turns + 1)
        dialogue.so_far = _extended(dialogue.so_far, turn.tokens, turn.log_probs, 1.0, with_turn)
        ends = bool(turn.tokens) and turn.tokens[-1] in self.engine.stop_tokens
        calls = find_calls(str(self.tokenizer.decode(turn.tokens))) if ends else []
        if not calls or use.calls + len(calls) > self.cfg.max_tool_calls:
            return self._open.pop(turn.row).so_far
        self._waiting.add(turn.row)
        if self.toolbox is not None:
            dialogue.numbers, dialogue.answers = self.toolbox.submit(calls), {}
        return None

    def _answered(self, seconds: float) -> tuple[list[GenerationRequest], list[Conversation]]:
        """The next turns of dialogues whose tools have answered, and responses that have no room for one.

        Waits so long for the first answer, at most.
        """
        following: list[GenerationRequest] = []
        ended: list[Conversation] = []
        if not self._waiting:
            return following, ended
        for row, answers in self.group.share(lambda: self._collect(seconds)):
            self._waiting.remove(row)
            dialogue = self._open[row]
            ids = self.turns.ids([answer.text for answer in answers])
            use = dialogue.so_far.tool_use
            statuses = [answer.status for answer in answers]
            use = replace(
                use,
                calls=use.calls + len(answers),
                failed=use.failed + statuses.count(CallStatus.FAILED),
                timed_out=use.timed_out + statuses.count(CallStatus.TIMED_OUT),
            )
            room = self.longest - len(dialogue.so_far.tokens) - len(ids)
            if room <= 0:
                ended.append(replace(self._open.pop(row).so_far, tool_use=use))
                continue
            use = replace(use, tokens=use.tokens + len(ids))
            dialogue.so_far = _extended(dialogue.so_far, ids, [0.0] * len(ids), 0.0, use)
            following.append(self._next_turn(dialogue, room))
        return following, ended

    def _collect(self, seconds: float) -> list[tuple[int, list[ToolAnswer]]]:
        """Rows all of whose calls are answered, with the answers in the order of the calls."""
        assert self.toolbox is not None, "the leader has one"
        answers = self.toolbox.answers(seconds)
        complete = []
        for row in sorted(self._waiting):
            dialogue = self._open[row]
            dialogue.answers |= {number: answers[number] for number in dialogue.numbers if number in answers}
            if len(dialogue.answers) == len(dialogue.numbers):
                complete.append((row, [dialogue.answers[number] for number in dialogue.numbers]))
        return complete

    def _next_turn(self, dialogue: _Dialogue, room: int) -> GenerationRequest:
        first, so_far = dialogue.request, dialogue.so_far
        turn = so_far.tool_use.turns
        return GenerationRequest(
            first.row,
            torch.cat((first.prompt, torch.tensor(so_far.tokens, dtype=first.prompt.dtype))),
            seed=None if first.seed is None else _seed(first.seed, turn),
            turn=turn,
            max_tokens=min(self.longest_turn, room),
        )


def _seed(first: int, turn: int) -> int:
    """Of a later turn of the response whose first turn has the seed `first`: apart from those of all others."""
    return int(np.random.SeedSequence((first, turn)).generate_state(1)[0] >> 1)


def _extended(
    so_far: Conversation, tokens: Sequence[int], log_probs: Sequence[float] | None, mask: float, use: ToolUse
) -> Conversation:
    return replace(
        so_far,
        tokens=[*so_far.tokens, *tokens],
        log_probs=None if log_probs is None or so_far.log_probs is None else [*so_far.log_probs, *log_probs],
        mask=[*so_far.mask, *[mask] * len(tokens)],
        tool_use=use,
    )
