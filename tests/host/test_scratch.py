"""Memory that decode calls leave as they found it: what graphs share, and what they may not."""

from types import SimpleNamespace

import pytest
import torch

from lowbit_attn import hopper, scratch
from lowbit_attn.hopper.common.tuning import LINE_WORDS, PACE_COUNTS
from lowbit_attn.hopper.config import SCHEDULES

CPU = torch.device("cpu")
WORD = -1


@pytest.fixture
def capture(monkeypatch):
    """Captures on a CPU: a dict whose ``number`` and ``stream`` say which one is under way, if any."""
    now = {"number": None, "stream": 7}
    monkeypatch.setattr(scratch, "is_capturing", lambda device: now["number"] is not None)
    monkeypatch.setattr(scratch, "capture_id", lambda stream: now["number"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=now["stream"]))
    for name in ("_FREE", "_OF_CAPTURE", "_NO_SINK_LOGIT"):
        monkeypatch.setattr(scratch, name, {})
    monkeypatch.setattr(scratch, "GRAPH_SCRATCH", 100)
    scratch.prepare(CPU, WORD)
    return now


def words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).flatten()


def test_words_are_set_and_eager_calls_have_their_own(capture):
    first, second = (scratch.partials((2, 3), WORD, CPU) for _ in range(2))
    assert first.shape == (2, 3) and first.dtype == torch.float32 and (words(first) == WORD).all()
    assert first.data_ptr() != second.data_ptr()
    assert scratch.partials((4,), None, CPU).shape == (4,)


@pytest.mark.parametrize("word", (WORD, None))
def test_a_header_lies_before_the_words(word, capture):
    found = scratch.partials((2, 3), word, CPU, header=64)
    assert found.shape == (2, 3) and found.storage_offset() == 64 and found.is_contiguous()


def test_calls_that_share_memory_have_the_same_header():
    """A path that counts would else leave numbers where another one takes all words to be EMPTY."""
    shape = (2, 1, 8, 128)
    found = hopper.scratch(shape, 4, 4, 2), hopper.even_scratch(shape, 4, 132)
    assert {(one.word, one.header) for one in found} == {(hopper.EMPTY, PACE_COUNTS * LINE_WORDS)}


def test_the_header_has_a_line_for_each_cta_of_an_sm():
    """Each counts in a line of its own; one more would lie in front of the header."""
    assert max(schedule.ctas_per_sm for schedule in SCHEDULES.values()) <= PACE_COUNTS


def test_calls_of_one_capture_and_stream_share(capture):
    capture["number"] = 1
    first, smaller = scratch.partials((5, 4), WORD, CPU), scratch.partials((3,), WORD, CPU)
    assert (words(first) == WORD).all() and smaller.data_ptr() == first.data_ptr()
    larger = scratch.partials((7, 4), WORD, CPU)
    assert not overlap(first, larger)
    capture["stream"] = 8
    assert not overlap(larger, scratch.partials((4,), WORD, CPU))
    capture.update(number=2, stream=7)
    other = scratch.partials((5, 4), WORD, CPU)
    assert not overlap(first, other) and not overlap(larger, other)
    assert all(x.data_ptr() % 32 == first.data_ptr() % 32 for x in (larger, other))  # whole sectors


def test_words_of_another_kind_are_others(capture):
    capture["number"] = 1
    cells, counters = scratch.partials((5,), WORD, CPU), scratch.words(5, 0, CPU)
    assert (words(cells) == WORD).all() and (counters == 0).all() and counters.dtype == torch.int32
    assert scratch.words(4, 0, CPU).data_ptr() == counters.data_ptr()
    capture["number"] = 2
    assert not overlap(counters, scratch.words(4, 0, CPU))


def test_a_capture_beyond_the_stock_sets_its_words_itself(capture):
    capture["number"] = 1
    stock = scratch.partials((96,), WORD, CPU)
    capture["number"] = 2
    first, second = (scratch.partials((5,), WORD, CPU) for _ in range(2))
    assert (words(first) == WORD).all() and not overlap(first, stock)
    assert second.data_ptr() == first.data_ptr(), "calls leave the words as they were set: once a capture is enough"


def test_a_driver_that_does_not_number_captures(capture, monkeypatch):
    capture["number"] = 1
    monkeypatch.setattr(scratch, "capture_id", lambda stream: None)
    first, second = (scratch.partials((5,), WORD, CPU) for _ in range(2))
    assert not overlap(first, second), "they may be of different graphs"


def test_no_capture_without_a_driver(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(scratch, "_driver", missing)
    assert scratch.capture_id(0) is None


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes
