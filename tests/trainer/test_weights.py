"""Weights through host memory: bit for bit, in buckets of bounded size, and two versions at most."""

import pickle

import pytest
import torch

from mindspeed_rl.workers.weights import PublishedWeights, WeightBoard, pack_weights, unpack_weights


@pytest.fixture
def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"odd": (3, 5), "vector": (7,), "number": (), "large": (40, 40), "nothing": (0, 4), "last": (2, 2)}
    drawn = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return [*drawn, ("half", drawn[0][1].bfloat16()), ("view", drawn[3][1].t())]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_tensors_come_out_as_they_went_in(bucket_bytes: int, weights: list[tuple[str, torch.Tensor]]) -> None:
    buckets = [pickle.loads(pickle.dumps(bucket, protocol=5)) for bucket in pack_weights(weights, bucket_bytes)]
    found = list(unpack_weights(buckets))
    assert [name for name, _ in found] == [name for name, _ in weights]
    for (name, tensor), (_, expected) in zip(found, weights, strict=True):
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    for bucket in buckets:
        assert len(bucket.slots) == 1 or bucket.slots[-1].stop <= bucket_bytes
    assert len(buckets) == {1: len(weights), 10**6: 1}.get(bucket_bytes, len(buckets))


def test_packing_takes_a_copy_at_once() -> None:
    """Exported tensors may be views of a buffer that the next bucket overwrites."""
    buffer = torch.ones(4)

    def overwriting():
        yield "first", buffer
        buffer.zero_()
        yield "second", buffer

    found = dict(unpack_weights(pack_weights(overwriting(), 10**6)))
    assert found["first"].tolist() == [1.0] * 4
    assert found["second"].tolist() == [0.0] * 4


def test_the_board_keeps_the_newest_version_and_the_one_before() -> None:
    board = WeightBoard()
    for version in (3, 4, 5):
        board.put(version, PublishedWeights([], {"tensor": version}))
    assert board.newest() == 5
    assert [board.get(version).checksums["tensor"] for version in (4, 5)] == [4, 5]
    with pytest.raises(KeyError):
        board.get(3)
