from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.inside.steps.data import MAX_PARTS, count_elements  # noqa: E402

Pair = namedtuple("Pair", "image label")


@dataclass
class Sample:
    tokens: object
    names: list


class Untouchable:
    def __getattribute__(self, name):
        raise RuntimeError(name)


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("batch", "elements"),
    [
        (ones(4, 8), 32),
        ([ones(4, 8), torch.arange(4)], 36),
        ({"input_ids": ones(2, 7), "labels": ones(2, 7)}, 28),
        (OrderedDict(a=ones(3)), 3),
        (UserDict({"input_ids": ones(2, 5), "encodings": None}), 10),  # what tokenizers return
        (Pair(ones(2, 3, 4), torch.arange(2)), 26),
        (Sample([ones(5), ones(2)], ["a", "b"]), 7),
        ((ones(3), ["text"] * 5000), 3),
        ((ones(3), [7] * 5000), 3),
        (torch.nn.utils.rnn.pack_sequence([ones(3), ones(2)]), 8),
        ([ones(2), None, 3, "x"], 2),
        (ones(4).to_sparse(), 4),
    ],
)
def test_elements_of_all_tensors_of_a_batch_are_counted(batch, elements):
    assert count_elements(batch) == elements


@pytest.mark.parametrize("batch", [None, 3, "text", [], ["a", "b"], object(), [ones(1)] * (MAX_PARTS + 1)])
def test_of_a_batch_that_cannot_be_looked_at_nothing_is_said(batch):
    assert count_elements(batch) == 0


def test_a_part_of_a_batch_is_not_asked_where_its_class_would_answer():
    assert count_elements([ones(2), Untouchable()]) == 2


def test_a_batch_that_holds_itself_is_looked_at_once():
    batch = [ones(3)]
    batch.append(batch)
    assert count_elements(batch) == 3


def test_no_more_parts_are_looked_at_than_take_a_moment():
    class Endless(dict):
        asked = 0

        def values(self):
            Endless.asked += 1
            return [Endless()]

    assert count_elements(Endless()) == 0
    assert Endless.asked <= MAX_PARTS
