"""Prompts from files: every format that is read, and every input that is refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.data.prompts import load_prompts

ROWS = [
    {"prompt": "3+4=", "answer": "7", "data_source": "sums", "extra": {"a": [1, 2]}},
    {"prompt": "1+1=", "answer": 2},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def load(tokenizer):
    def load(path, max_prompt_length=16, tokenizer=tokenizer, **actor):
        path = [str(each) for each in path] if isinstance(path, list) else str(path)
        return load_prompts(
            MegatronConfig(data_path=path, **actor), RLConfig(max_prompt_length=max_prompt_length), tokenizer
        )

    return load


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_jsonl(tmp_path, load, tokenizer):
    data = load(write_jsonl(tmp_path / "my.jsonl", ROWS))
    assert len(data) == 2
    assert data.dropped_too_long == 0
    first, second = data[0], data[1]
    assert (first.prompt_text, first.label, first.data_source, first.extra) == ("3+4=", "7", "sums", {"a": [1, 2]})
    assert tokenizer.decode(first.prompt_ids) == "3+4="
    assert (second.label, second.data_source, second.extra) == ("2", "my", {})


def test_parquet_and_json_and_many_files(tmp_path, load):
    rows = [{"q": "3+4=", "solution": {"value": "7"}, "extra": '{"b": 1}'}, {"q": "1+1=", "solution": {"value": "2"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(rows[::-1]))
    data = load([tmp_path / "a.parquet", tmp_path / "b.json"], prompt_key="q", answer_key="solution.value")
    assert [sample.label for sample in data.samples] == ["7", "2", "2", "7"]
    assert data[0].extra == {"b": 1}


def test_prefix(tmp_path, load):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "set.parquet")
    assert load(tmp_path / "set")[0].label == "7"


def test_chat_template(tmp_path, load, tokenizer):
    rows = [
        {"prompt": "3", "answer": "x"},
        {"prompt": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], "answer": "x"},
    ]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [s.prompt_text for s in load(file, apply_chat_template=True).samples] == ["3", "12"]
    with_system = load(file, apply_chat_template=True, system_prompt="9")
    assert [s.prompt_text for s in with_system.samples] == ["93", "92"]  # replaces the row's own
    assert tokenizer.decode(with_system[1].prompt_ids) == "92"


def test_long_prompts_are_dropped_and_counted(tmp_path, load):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1" * n, "answer": "1"} for n in range(1, 9)])
    data = load(file, max_prompt_length=5)
    assert [len(sample.prompt_ids) for sample in data.samples] == [1, 2, 3, 4, 5]
    assert data.dropped_too_long == 3


def test_nothing_left_is_an_error(tmp_path, load):
    with pytest.raises(DataError, match="all 2 prompts are longer than max_prompt_length = 3"):
        load(write_jsonl(tmp_path / "a.jsonl", ROWS), max_prompt_length=3)


GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "actor", "expected"),
    [
        (b"", {}, "the data set is empty"),
        (b"\n \n", {}, "the data set is empty"),
        (
            GOOD,
            {"prompt_key": "promt"},
            r":1: prompt_key = 'promt': no such column.*\['answer', 'prompt'\].*'prompt'",
        ),
        (GOOD, {"answer_key": "label"}, r":1: answer_key = 'label': no such column"),
        (GOOD, {"answer_key": "a.b"}, r":1: answer_key = 'a.b': is missing or empty"),
        (GOOD + b'{"prompt": "1", "answer": null}\n', {}, r":2: answer_key = 'answer': is missing or empty"),
        (GOOD + b'{"prompt": "1", "answer": ""}\n', {}, r":2: answer_key = 'answer': is missing or empty"),
        (GOOD + b'{"prompt": "1"}\n', {}, r":2: answer_key = 'answer': no such column"),
        (GOOD + b'{"prompt": "", "answer": "1"}\n', {}, r":2: prompt_key = 'prompt': is missing or empty"),
        (GOOD + b'{"prompt": "\xff", "answer": "1"}\n', {}, r":2: is not UTF-8 text: .* at byte 13"),
        (GOOD + b'\n{"prompt": "1", \n', {}, r":3: is not valid JSON"),
        (GOOD + b"[1, 2]\n", {}, r":2: must be an object with columns, is \[1, 2\]"),
        (GOOD + b'{"prompt": 5, "answer": "1"}\n', {}, r":2: prompt_key = 'prompt': must be text or a list"),
        (GOOD + b'{"prompt": ["x"], "answer": "1"}\n', {}, r":2: prompt_key = 'prompt': must be text or a list"),
        (GOOD + b'{"prompt": [{"role": "user"}], "answer": "1"}\n', {}, r":2: .*must be text or a list"),
        (GOOD + b'{"prompt": "1", "answer": ["1"]}\n', {}, r":2: answer_key = 'answer': must be text or a number"),
        (GOOD + b'{"prompt": "1", "answer": true}\n', {}, r":2: answer_key = 'answer': must be text or a number"),
        (b'{"prompt": "1", "answer": "1", "extra": 3}\n', {}, r":1: extra: must be an object"),
        (b'{"prompt": "1", "answer": "1", "extra": "{"}\n', {}, r":1: extra: is not valid JSON"),
        (b'{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}\n', {}, "set apply_chat_template: true"),
    ],
)
def test_refused_jsonl(tmp_path, load, content, actor, expected):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=expected) as error:
        load(file, **actor)
    assert "bad.jsonl" in str(error.value)


def test_refused_files(tmp_path, load):
    with pytest.raises(DataError, match=r"data_path = '.*none': no such file"):
        load(tmp_path / "none")
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"file type '\.csv' is not one of"):
        load(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet after row 0"):
        load(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match="must hold a list of rows"):
        load(tmp_path / "a.json")


def test_chat_template_absent(tmp_path, load, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"apply_chat_template = True, but tokenizer .* has no chat template"):
        load(write_jsonl(tmp_path / "a.jsonl", ROWS), apply_chat_template=True, tokenizer=tokenizer)
