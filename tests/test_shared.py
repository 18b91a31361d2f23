"""Results that are computed once within a block."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pyro_nngp._shared import shared, shared_results


def test_results_are_kept_within_a_block_by_key():
    calls = []

    def compute():
        calls.append(1)
        return len(calls)

    assert [shared("a", compute), shared("a", compute)] == [1, 2]
    with shared_results():
        assert [shared(key, compute) for key in "aab"] == [3, 3, 4]
        with shared_results():
            assert shared("a", compute) == 5
        assert shared("a", compute) == 3
        with ThreadPoolExecutor(1) as other:
            assert other.submit(shared, "a", compute).result() == 6
    with pytest.raises(ValueError, match="inside"), shared_results():
        raise ValueError("inside")
    assert shared("a", compute) == 7
