"""Training checkpoints: exact round trip, every kind of damage named, and a stop at any step of a save."""

import json
import os
import re
import shutil
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

from mindspeed_rl.checkpoint.background import BackgroundWriter
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import CheckpointReader, CheckpointStore, is_checkpoint, open_checkpoint
from mindspeed_rl.checkpoint.tensors import Piece
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.device.cpu import CpuDevice

torch.set_num_threads(1)
LAYOUT = SimpleNamespace(world=2, tp=2, pp=1, dp=1, ep=1)


def whole(iteration):
    """What the ranks share: the first two rows are on rank 0."""
    return torch.arange(20.0).view(4, 5) + 1000 * iteration


def pieces(iteration, rank):
    return [Piece("model.a", (4, 5), (2 * rank, 0), whole(iteration)[2 * rank : 2 * rank + 2])]


def rank_state(iteration, rank):
    flat = torch.arange(100.0) + 1000 * iteration + rank
    return {
        "a": flat[10:20].view(2, 5),
        "scheduler": [{"step": iteration, "lr": 0.1, "betas": (0.9, 0.95), "none": None, "dtype": torch.float32}],
        "rng": {"cpu": torch.arange(5, dtype=torch.uint8), "python": (3, (1, 2), None)},
        "ordered": OrderedDict(x=True),
    }


def store_at(root, hf_folder=None):
    return CheckpointStore(root, hf_folder, layout=LAYOUT)


def save(store, iteration):
    store.begin(iteration)
    for rank in range(2):
        CheckpointStore(store.root).write_rank(iteration, rank, pieces(iteration, rank), rank_state(iteration, rank))
    return store.commit(iteration, {"sampler": {"epoch": 1, "order": [3, 1]}, "kl_coef": 0.125})


def assert_complete(path, iteration):
    reader = CheckpointReader(path)
    assert reader.trainer["iteration"] == iteration
    reader.check_tensors()
    ((name, tensor),) = reader.weights()
    assert name == "a"
    assert torch.equal(tensor, whole(iteration))
    for rank in range(2):
        assert torch.equal(reader.load_rank(rank, LAYOUT)["a"], rank_state(iteration, rank)["a"])


def test_round_trip(tmp_path):
    store = store_at(tmp_path / "run")
    assert store.latest() is None
    assert not is_checkpoint(tmp_path)
    path = save(store, 12)
    assert path == store.latest() == tmp_path / "run" / "iter_0000012"
    files = ["manifest.json", "rank_00000.pt", "rank_00001.pt", "tensors", "trainer.json"]
    assert sorted(os.listdir(path)) == files
    assert sorted(os.listdir(path / "tensors")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert sorted(os.listdir(store.root)) == ["iter_0000012", "latest"]
    assert is_checkpoint(path)
    assert is_checkpoint(store.root)
    trainer = CheckpointStore.load_trainer(store.root)
    assert (trainer["sampler"], trainer["kl_coef"]) == ({"epoch": 1, "order": [3, 1]}, 0.125)
    assert trainer["versions"]["torch"] == torch.__version__
    assert_complete(path, 12)
    found, expected = CheckpointReader(path).load_rank(1, LAYOUT), rank_state(12, 1)
    assert found["scheduler"] == expected["scheduler"]
    assert found["rng"]["python"] == (3, (1, 2), None)
    # a view is stored without the storage it looks into
    assert found["a"].untyped_storage().nbytes() == 40


def test_newest_checkpoint_is_the_latest_one(tmp_path):
    store = store_at(tmp_path)
    paths = [save(store, 5), save(store, 10)]
    assert store.latest() == paths[1]
    assert open_checkpoint(tmp_path).trainer["iteration"] == 10
    assert_complete(paths[0], 5)
    assert save(store, 10) == paths[1]  # the same iteration again
    assert_complete(paths[1], 10)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000005", "iter_0000010", "latest"]


class Stop(BaseException):
    """Stands for SIGKILL: no handler runs."""


@pytest.mark.parametrize("second", [4, 3], ids=["new iteration", "same iteration"])
def test_a_stop_at_any_step_leaves_a_complete_checkpoint(tmp_path, monkeypatch, second):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    # every call that changes the disk or makes it durable
    steps = [(os, name) for name in ("replace", "fsync", "mkdir", "unlink", "rmdir")] + [(shutil, "rmtree")]
    originals = {name: getattr(module, name) for module, name in steps}
    outcomes = []
    for stop_at in range(1000):
        root = tmp_path / str(stop_at)
        save(store_at(root), 3)
        count = 0

        def step(name, *args, stop_at=stop_at, **kwargs):
            nonlocal count
            count += 1
            if count > stop_at:
                raise Stop
            return originals[name](*args, **kwargs)

        with monkeypatch.context() as patch:
            for module, name in steps:
                patch.setattr(module, name, lambda *args, name=name, **kwargs: step(name, *args, **kwargs))
            try:
                save(store_at(root, tmp_path / "hf"), second)
                stopped = False
            except Stop:
                stopped = True
        found = CheckpointStore(root).latest()
        assert_complete(found, int(found.name[-7:]))
        outcomes.append((CheckpointReader(found).hf_folder is not None, stopped))
        save(store_at(root), 7)  # the next run goes on from there
        assert_complete(CheckpointStore(root).latest(), 7)
        assert not list(root.glob(".*"))  # no remains
        shutil.rmtree(root)
        if not stopped:
            break
    assert len(outcomes) > 15
    assert outcomes[0] == (False, True)
    assert outcomes[-1] == (True, False)
    is_new = [new for new, _ in outcomes]
    assert is_new == sorted(is_new)  # old up to one step, new from there on


def test_model_files_travel_with_the_checkpoint(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("[]")
    (source / "model.safetensors").write_bytes(b"large")
    path = save(store_at(tmp_path / "run", source), 1)
    folder = CheckpointReader(path).hf_folder
    assert sorted(os.listdir(folder)) == ["config.json", "tokenizer.json"]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"hf/tokenizer\.json is missing"):
        CheckpointReader(path)


def test_damage_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: manifest\.json is missing"):
        CheckpointReader(tmp_path)
    path = save(store_at(tmp_path), 12)
    reads = {
        "rank_00001.pt": lambda reader: (reader.load_rank(0, LAYOUT), reader.load_rank(1, LAYOUT)),
        "tensors/__1_0.distcp": lambda reader: (reader.check_tensors(1, 2), reader.check_tensors(0, 2)),
        "tensors/.metadata": lambda reader: reader.tensors,
    }
    for name, read in reads.items():
        file, named = path / name, re.escape(name)
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=rf"{named} is truncated: {len(content) - 1} bytes instead of"):
            CheckpointReader(path)
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(CheckpointError, match=rf"{named} is corrupt: its content does not match"):
            read(CheckpointReader(path))
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"{named} is missing"):
            CheckpointReader(path)
        file.write_bytes(content)
        read(CheckpointReader(path))
    trainer = (path / "trainer.json").read_text()
    (path / "trainer.json").write_text(trainer.replace("0.125", "0.225"))
    with pytest.raises(CheckpointError, match=r"trainer\.json is corrupt"):
        CheckpointReader(path)
    (path / "manifest.json").write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match=r"has format 99; this version reads 2 \(format 1 can be converted"):
        CheckpointReader(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt"):
        CheckpointReader(path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="latest names iter_0000012, which does not exist"):
        open_checkpoint(tmp_path)


def test_another_layout_gets_what_does_not_belong_to_a_rank(tmp_path):
    reader = CheckpointReader(save(store_at(tmp_path), 12))
    assert reader.layout == vars(LAYOUT)
    for changed in ({"tp": 1, "dp": 2}, {"world": 8, "dp": 4}, {"ep": 2}):
        found = reader.load_rank(1, SimpleNamespace(**{**vars(LAYOUT), **changed}))
        assert "rng" not in found
        assert found["scheduler"] == rank_state(12, 0)["scheduler"]


def test_ranks_that_have_not_written_are_named(tmp_path):
    store = store_at(tmp_path)
    with pytest.raises(CheckpointError, match="was not begun"):
        store.write_rank(3, 0, [], {})
    store.begin(3)
    store.write_rank(3, 0, pieces(3, 0), {})
    assert not store.is_written(3)
    with pytest.raises(CheckpointError, match=r"cannot be completed: rank_00001\.pt not written"):
        store.commit(3, {})
    store.write_rank(3, 1, [], {})
    assert store.is_written(3)
    with pytest.raises(CheckpointError, match=r"parts of 1 tensors were not written once: model\.a"):
        store.commit(3, {})
    assert store.latest() is None


@pytest.mark.parametrize("value", [numpy.float64(1.0), {1, 2}, numpy.zeros(3), object()])
def test_values_that_could_not_be_read_back_are_refused(tmp_path, value):
    store = store_at(tmp_path)
    store.begin(1)
    with pytest.raises(CheckpointError, match=rf"state\['rng'\]\[0\] is a {type(value).__qualname__}"):
        store.write_rank(1, 0, [], {"rng": [value]})


def test_further_objects_travel_with_a_checkpoint(tmp_path):
    store = store_at(tmp_path / "run")
    store.begin(1)
    for rank in range(2):
        store.write_rank(1, rank, pieces(1, rank), rank_state(1, rank))
    path = store.commit(1, {}, {"dock.pkl": {"rows": numpy.arange(3)}})
    reader = CheckpointReader(path)
    assert reader.attachment("dock.pkl")["rows"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"holds no other\.pkl"):
        reader.attachment("other.pkl")
    content = (path / "dock.pkl").read_bytes()
    (path / "dock.pkl").write_bytes(content[:-2] + b"xx")
    with pytest.raises(CheckpointError, match=r"dock\.pkl"):
        CheckpointReader(path).attachment("dock.pkl")


def test_only_the_newest_are_kept_whoever_wrote_them(tmp_path):
    for iteration in (1, 2, 3):
        save(store_at(tmp_path), iteration)
    store = store_at(tmp_path)  # of a run that went on, and knows of none of them
    (tmp_path / "iter_0000099").mkdir()  # not complete: not a checkpoint
    save(store, 4)
    store.retain(2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004", "iter_0000099"]
    assert_complete(store.latest(), 4)
    save(store, 5)
    store.retain(1, needed=tmp_path / "iter_0000003")
    assert [(tmp_path / f"iter_000000{number}").exists() for number in (3, 4, 5)] == [True, False, True]


def test_the_newest_by_name_may_not_be_the_one_that_counts(tmp_path):
    store = store_at(tmp_path)
    save(store, 7)
    save(store, 3)  # of a run that began anew in the same folder
    store.retain(1)
    assert store.latest().name == "iter_0000003"
    assert_complete(store.latest(), 3)


def test_a_stop_while_one_is_removed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    store = store_at(tmp_path)
    for iteration in (1, 2):
        save(store, iteration)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.retain(1)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]
    save(store, 3)
    assert not list(tmp_path.glob(".tmp-*"))


def test_weights_in_hugging_face_form_come_from_the_tensors(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    store = store_at(tmp_path / "run", tmp_path / "hf")
    store.begin(1)
    for rank in range(2):
        store.write_rank(1, rank, pieces(1, rank), {})
    path = store.commit(1, {}, hf_weights=True)
    weights = HFWeights(path / "hf")
    assert weights.names == ["a"]
    assert torch.equal(weights.tensor("a"), whole(1))
    (path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"hf/model\.safetensors is truncated"):
        CheckpointReader(path)


def files_of(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_what_is_written_in_the_background_is_the_state_of_the_call(tmp_path):
    expected = files_of(save(store_at(tmp_path / "at once"), 1))
    store, writers = store_at(tmp_path / "later"), [BackgroundWriter(CpuDevice()) for _ in range(2)]
    store.begin(1)
    for rank, writer in enumerate(writers):
        mine = [replace(piece, data=piece.data.clone()) for piece in pieces(1, rank)]
        writer.write(CheckpointStore(store.root), 1, rank, mine, rank_state(1, rank))
        for piece in mine:
            piece.data.fill_(-1)  # training goes on
    for writer in writers:
        writer.wait()
    assert store.is_written(1)
    assert files_of(store.commit(1, {"sampler": {"epoch": 1, "order": [3, 1]}, "kl_coef": 0.125})) == expected


def test_a_failure_in_the_background_is_known_to_the_driver_and_to_who_waits(tmp_path):
    store, writer = store_at(tmp_path), BackgroundWriter(CpuDevice())
    writer.wait()  # for nothing
    store.begin(1)
    (store.root / ".tmp-iter_0000001" / "tensors").rmdir()
    writer.write(CheckpointStore(store.root), 1, 0, pieces(1, 0), {})
    with pytest.raises(FileNotFoundError, match="__0_0"):
        writer.wait()
    with pytest.raises(CheckpointError, match=r"checkpoint 1 could not be written: rank_00000: FileNotFoundError"):
        store.is_written(1)
    assert_complete(save(store, 1), 1)  # the next one is not disturbed
