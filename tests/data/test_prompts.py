"""Prompts from files: every format that is read, and every input that is refused."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from mindspeed_rl.common.errors import ConfigError, DataError
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


LONG = [{"prompt": "123456789", "answer": "x"}, {"prompt": "12", "answer": "y"}]


@pytest.mark.parametrize(
    ("truncation", "length", "expected"),
    [
        ("left", 4, "6789"),
        ("right", 4, "1234"),
        ("middle", 4, "1289"),
        ("middle", 5, "12389"),
        ("middle", 1, "1"),
        ("right", 9, "123456789"),
    ],
)
def test_long_prompts_are_shortened_where_that_is_asked_for(tmp_path, load, tokenizer, truncation, length, expected):
    data = load(write_jsonl(tmp_path / "a.jsonl", LONG), max_prompt_length=length, truncation=truncation)
    assert [sample.prompt_text for sample in data.samples] == [expected, "12"[:length]]
    assert tokenizer.decode(data[0].prompt_ids) == expected
    assert data.dropped_too_long == 0
    assert data.truncated == sum(len(row["prompt"]) > length for row in LONG)


def test_long_prompts_can_be_an_error(tmp_path, load):
    file = write_jsonl(tmp_path / "a.jsonl", LONG[::-1])
    with pytest.raises(DataError, match=r"a.jsonl:2: the prompt has 9 tokens, max_prompt_length = 4; see truncation"):
        load(file, max_prompt_length=4, truncation="error")
    assert len(load(file, max_prompt_length=9, truncation="error")) == 2


def test_the_first_prompts_that_fit_are_used(tmp_path, load):
    rows = [{"prompt": "1" * n, "answer": str(n)} for n in (9, 1, 9, 2, 3)]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), max_prompt_length=4, train_max_samples=2)
    assert [sample.label for sample in data.samples] == ["1", "2"]
    assert data.dropped_too_long == 2


def test_the_number_of_workers_changes_nothing(tmp_path, load, monkeypatch):
    monkeypatch.setattr("mindspeed_rl.data.prompts.TOKENISE_AT_ONCE", 3)
    rows = [{"prompt": str(n) * (n % 4 + 1), "answer": str(n), "extra": {"n": n}} for n in range(20)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    alone, together = load(file), load(file, num_workers=2)
    assert len(alone) == 20
    assert together.samples == alone.samples


def test_a_workers_error_names_the_row(tmp_path, load, monkeypatch):
    monkeypatch.setattr("mindspeed_rl.data.prompts.TOKENISE_AT_ONCE", 1)
    file = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": "1"}])
    with pytest.raises(DataError, match=r"a.jsonl:3: answer_key = 'answer': no such column"):
        load(file, num_workers=2)


def test_samples_come_by_index_from_one_array(tmp_path, load):
    rows = [{"prompt": "123"[:n], "answer": str(n)} for n in (3, 1, 2)]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [len(data[index].prompt_ids) for index in (0, 1, 2, -1)] == [3, 1, 2, 2]
    assert data[-1] == data[2]
    with pytest.raises(IndexError):
        data[3]


def test_template_of_the_users(tmp_path, load):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if closing %}={% endif %}")
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "3+4", "answer": "7"}])
    keys = {"apply_chat_template": True, "chat_template": str(template)}
    assert load(file, **keys)[0].prompt_text == "3+4"
    assert load(file, **keys, chat_template_kwargs={"closing": True})[0].prompt_text == "3+4="
    template.write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(DataError, match=r"a.jsonl:1: prompt_key = 'prompt': the chat template refuses it: no such"):
        load(file, **keys)
    with pytest.raises(DataError, match=r"chat_template = '.*missing.jinja': cannot be read"):
        load(file, apply_chat_template=True, chat_template=str(tmp_path / "missing.jinja"))


def test_columns_as_verl_has_them(tmp_path, load):
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "3+4="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    keys = {"answer_key": "reward_model.ground_truth", "apply_chat_template": True}
    sample = load(tmp_path / "train.parquet", **keys)[0]
    assert (sample.prompt_text, sample.label, sample.data_source) == ("3+4=", "7", "sums")
    assert load(tmp_path / "train.parquet", data_source_key="ability", **keys)[0].data_source == "math"
    assert load(tmp_path / "train.parquet", data_source_key="nothing", **keys)[0].data_source == "train"


CLASS = """
class Numbers:
    def __init__(self, files, tokenizer, config):
        self.lines = open(files[0]).read().split()
        assert tokenizer.eos_token_id is not None
        self.prompt = config.prompt_key

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        if self.lines[index] == "x":
            raise KeyError("x")
        if self.lines[index] == "0":
            return []
        return {self.prompt: self.lines[index] + "=", "answer": self.lines[index], "extra": {"index": index}}
"""


def test_a_data_set_of_the_users(tmp_path, load):
    code, file = tmp_path / "numbers.py", tmp_path / "numbers.json"
    code.write_text(CLASS)
    custom = {"path": str(code), "name": "Numbers"}
    file.write_text("12 345 67")
    data = load(file, custom_dataset=custom, max_prompt_length=3)
    assert [(s.prompt_text, s.label, s.data_source, s.extra) for s in data.samples] == [
        ("12=", "12", "numbers", {"index": 0}),
        ("67=", "67", "numbers", {"index": 2}),
    ]
    assert data.dropped_too_long == 1
    for text, message in {
        "12 x": r"custom_dataset: Numbers\[1\] raised KeyError: 'x'",
        "0": r"Numbers\[0\]: must be an object with columns, is \[\]",
        "": "the data set is empty",
    }.items():
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            load(file, custom_dataset=custom)
    with pytest.raises(
        ConfigError, match=r"custom_dataset.name = 'Number': is no class in .*numbers.py \(it has \['Num"
    ):
        load(file, custom_dataset={**custom, "name": "Number"})
    code.write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"custom_dataset.path = .*numbers.py'?: raised ZeroDivisionError"):
        load(file, custom_dataset=custom)


def test_messages_name_the_key_that_was_read(tmp_path, tokenizer):
    file = tmp_path / "val.jsonl"
    file.write_text("")
    for path, message in {str(file): "the data set is empty", f"{file}x": "no such file"}.items():
        with pytest.raises(DataError, match=f"^val_data_path = '{path}': {message}"):
            load_prompts(MegatronConfig(data_path=path), RLConfig(), tokenizer, "val_data_path")


def test_the_example_of_a_data_set(tmp_path, load):
    file = tmp_path / "pairs.json"
    file.write_text("3 4\n10 5\n")
    custom = {"path": str(Path(__file__).parents[2] / "examples" / "custom_dataset.py"), "name": "Sums"}
    data = load(file, custom_dataset=custom)
    assert [(s.prompt_text, s.label, s.data_source, s.extra["largest"]) for s in data.samples] == [
        ("3+4=", "7", "sums", 4),
        ("10+5=", "15", "sums", 10),
    ]


def test_sources_are_known_even_if_their_rows_are_left_out(load, tmp_path):
    rows = [
        {"prompt": "1+1=", "answer": "2", "data_source": "short"},
        {"prompt": "1+1+1+1+1+1+1+1+1=", "answer": "9", "data_source": "long"},
        {"prompt": "2+1=", "answer": "3", "data_source": "late"},
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    found = load(path)
    assert (found.row_sources, found.sources_read, found.is_whole) == (
        ["short", "late"],
        {"short", "long", "late"},
        True,
    )
    assert not load(path, train_max_samples=1).is_whole  # what else there is nobody has seen


def test_no_file_is_named(load):
    with pytest.raises(DataError, match=r"data_path = \[\]: names no file"):
        load([])
