"""Payloads: what came row by row travels as one buffer, and is the same on the other side."""

import pickle

import numpy as np
import torch

from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.payload import Scratch, pack
from mindspeed_rl.transfer_dock.spec import ColumnSpec, DockSpec

SPEC = DockSpec(
    columns={
        "tokens": ColumnSpec(dtype="int64", kind="jagged"),
        "log_probs": ColumnSpec(dtype="float32", kind="jagged"),
        "flat": ColumnSpec(dtype="float32", kind="jagged"),
        "reward": ColumnSpec(dtype="float32", kind="scalar"),
        "sample": ColumnSpec(dtype="object", kind="object"),
    },
    consumers={},
)
ROWS = np.arange(4)


def columns(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 0, 1, 5]
    return {
        "tokens": [torch.randint(0, 99, (length,), generator=generator) for length in lengths],
        "log_probs": [torch.randn(length, generator=generator) for length in lengths],
        "flat": Jagged(torch.randn(sum(lengths), generator=generator), lengths),
        "reward": torch.randn(4, generator=generator),
        "sample": ["a", "bb", "a", None],
    }


def test_rows_travel_in_one_buffer() -> None:
    scratch, given = Scratch(), columns(0)
    payload = pack(SPEC, ROWS, given, scratch)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    within = [buffer for buffer in buffers if np.shares_memory(np.frombuffer(buffer, np.uint8), payload.memory)]
    assert [len(buffer.raw()) for buffer in within] == [payload.memory.nbytes]
    copies = [bytes(buffer.raw()) for buffer in buffers]
    pack(SPEC, ROWS, columns(1), scratch)  # uses the memory again
    found = pickle.loads(data, buffers=copies)
    assert list(found.columns) == list(given)
    for name in ("tokens", "log_probs"):
        np.testing.assert_array_equal(found.columns[name].flat, torch.cat(given[name]).numpy())
        assert np.shares_memory(found.columns[name].flat, found.memory)
        assert found.columns[name].flat.ctypes.data % found.columns[name].flat.itemsize == 0
    np.testing.assert_array_equal(found.columns["flat"].flat, given["flat"].values.numpy())
    np.testing.assert_array_equal(found.columns["reward"].flat, given["reward"].numpy())
    assert found.nbytes == payload.nbytes


def test_what_is_kept_in_the_process_is_a_copy() -> None:
    given = columns(0)
    payload = pack(SPEC, ROWS, given)
    expected = given["flat"].values.clone()
    given["flat"].values.zero_()
    np.testing.assert_array_equal(payload.columns["flat"].flat, expected.numpy())


def test_a_put_of_nothing_but_empty_rows() -> None:
    payload = pack(SPEC, ROWS, {"tokens": [torch.empty(0, dtype=torch.int64)] * 4}, Scratch())
    found = pickle.loads(pickle.dumps(payload))
    assert found.columns["tokens"].flat.dtype == np.int64
    assert found.columns["tokens"].row_lengths.tolist() == [0, 0, 0, 0]
