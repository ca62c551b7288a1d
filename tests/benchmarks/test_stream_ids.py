"""The ids that are streamed through a dynamic table."""

import numpy as np

from benchmarks.stream_ids import stream


def test_half_of_the_ids_are_new_and_the_others_have_been_there():
    seen: set[int] = set()
    drawn = []
    for ids, _ in stream(64).take(50):
        new, others = np.split(ids.numpy(), 2)
        assert len(set(new.tolist())) == 32
        assert not seen & set(new.tolist())
        seen |= set(new.tolist())
        assert set(others.tolist()) <= seen
        drawn += others.tolist()
    _, counts = np.unique(drawn, return_counts=True)
    assert counts.max() > 20 * np.median(counts)
