"""Changes to DataLoaders."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

NUMBERS = list(range(12))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


def test_workers_deliver_the_same_batches_in_the_same_order(job):
    alone = [batch.tolist() for batch in DataLoader(NUMBERS, batch_size=5)]
    job.change("dataloader:workers=2,prefetch_factor=3,persistent_workers=true")
    loader = DataLoader(NUMBERS, batch_size=5)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert [batch.tolist() for batch in loader] == alone
    assert job.places()[0]["where"].startswith("DataLoader at test_data.py:")


def test_a_number_of_workers_that_the_script_gives_is_replaced_and_said(job):
    job.change("dataloader:workers=1")
    assert DataLoader(NUMBERS, num_workers=3).num_workers == 1
    assert job.places()[0]["instead_of"] == "num_workers=3"


def test_without_workers_there_is_nothing_left_of_them(job):
    job.change("dataloader:workers=0")
    loader = DataLoader(NUMBERS, num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=5)
    assert next(iter(loader)).tolist() == [0]
    assert "prefetch_factor=4" in job.places()[0]["instead_of"]


@pytest.mark.parametrize(
    ("edit", "dataset", "options", "reason"),
    [
        ("dataloader:prefetch_factor=4", NUMBERS, {}, "has no workers"),
        ("dataloader:workers=2", NUMBERS, {"num_workers": 2}, "the script sets num_workers=2 itself"),
        ("dataloader:workers=2", Stream(), {}, "each worker would read all of an IterableDataset"),
    ],
)
def test_what_cannot_be_changed_is_refused_and_left_alone(job, edit, dataset, options, reason):
    job.change(edit)
    loader = DataLoader(dataset, **options)
    assert loader.num_workers == options.get("num_workers", 0)
    assert reason in job.refused()


def test_one_worker_may_read_a_stream(job):
    job.change("dataloader:workers=1")
    assert [batch.item() for batch in DataLoader(Stream())] == NUMBERS
    assert len(job.places()) == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinning has an effect here")
def test_pinning_without_an_accelerator_is_refused(job):
    job.change("dataloader:pin_memory=true")
    DataLoader(NUMBERS)
    assert "no effect without an accelerator" in job.refused()


def test_a_loader_that_is_made_again_from_the_changed_one_is_none_too_many(job):
    job.change("dataloader:workers=1")
    first = DataLoader(NUMBERS)
    DataLoader(NUMBERS, num_workers=first.num_workers)
    assert len(job.places()) == 1
