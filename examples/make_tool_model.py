"""Make a tiny model that has begun to learn to call a calculator, and sums that it is to learn it on.

python examples/make_tool_model.py --output examples/models/tiny_tools --data examples/data/sums.jsonl

It learns from written-out answers for some seconds: of a sum of large numbers, the call with both numbers, and after
an answer of the tool, that answer. The answers that it sees are any numbers, so that it does not learn to add.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from examples.make_tiny_model import TOKENS, make_tiny_model, make_tokenizer

# stretches that never differ are one token each
BEGIN, END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
TOOL, TURN = "<tool>", "<turn>"
ADDED = [BEGIN, END, TOOL, TURN]
EOS = TOKENS[0]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}<tool>{% endif %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)


def tool_tokenizer() -> Qwen2Tokenizer:
    """That of the tiny model, with the tokens of calls and turns."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(ADDED)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def sums(count: int, seed: int, digits: int = 3) -> list[dict[str, str]]:
    """So many prompts with two numbers of so many digits, and their answers, which have one digit more."""
    draw, low, high = random.Random(seed), 5 * 10 ** (digits - 1), 10**digits - 1
    pairs = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def make_tool_model(path: str | Path, steps: int = 200, batch: int = 64, seed: int = 0) -> Path:
    """Save such a model and its tokenizer as a Hugging Face folder.

    steps, batch: of supervised learning, and its rows.
    """
    tokenizer = tool_tokenizer()
    folder = make_tiny_model(path, vocab=len(tokenizer), max_positions=128, seed=seed)
    tokenizer.save_pretrained(folder)
    model, draw = AutoModelForCausalLM.from_pretrained(folder), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for step in range(steps):
        rows = [{**row, "answer": str(draw.randint(1000, 1998))} for row in sums(batch, seed + 1 + step)]
        ids, learned = zip(*(_written_out(tokenizer, row) for row in rows), strict=True)
        longest = max(map(len, ids))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for row in learned])
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def _written_out(tokenizer: Qwen2Tokenizer, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """A whole answer's tokens, and of those that the model would generate the labels; -100 for others."""
    parts = [
        (f"{row['prompt']}{TURN}", False),
        (f"{BEGIN}{row['prompt'][:-1]}{END}{EOS}", True),
        (f"{TOOL}{row['answer']}{TURN}", False),
        (f"{row['answer']}{EOS}", True),
    ]
    ids: list[int] = []
    labels: list[int] = []
    for text, is_learned in parts:
        added = tokenizer(text)["input_ids"]
        ids += added
        labels += added if is_learned else [-100] * len(added)
    return ids, labels


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="folder of the model to write")
    parser.add_argument("--data", required=True, type=Path, help="file of the sums to write")
    parser.add_argument("--steps", type=int, default=200, help="of supervised learning")
    parser.add_argument("--rows", type=int, default=1024, help="sums to write")
    options = parser.parse_args()
    options.data.parent.mkdir(parents=True, exist_ok=True)
    options.data.write_text("".join(json.dumps(row) + "\n" for row in sums(options.rows, 0)))
    print(make_tool_model(options.output, options.steps))


if __name__ == "__main__":
    main()
