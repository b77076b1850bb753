# SPDX-License-Identifier: Apache-2.0
"""The check of calls on backends that do not see a desync by themselves; ranks are threads."""
from __future__ import annotations

import threading

import pytest

from ms_dtensor.comm.agree import Agreement, check_every
from ms_dtensor.errors import CollectiveMismatch, ConfigError
from tests.msrun import PATIENCE


def run(programs, every):
    """What each rank's check raised, and how many checksums were gathered."""
    n = len(programs)
    meet, boxes, raised, gathered = threading.Barrier(n, timeout=PATIENCE), [None] * n, [None] * n, []

    def rank(r):
        def gather(value, group):
            boxes[r] = value if isinstance(value, int) else list(value)  # as a message: a copy
            meet.wait()
            got = list(boxes)
            if r == 0 and isinstance(value, int):
                gathered.append(value)
            meet.wait()
            return got
        agreement = Agreement(every, gather, gather)
        try:
            for what, about in programs[r]:
                agreement.call(what, about, tuple(range(n)))
        except CollectiveMismatch as e:
            raised[r] = e
    threads = [threading.Thread(target=rank, args=(r,)) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return raised, len(gathered)


def test_ranks_that_agree_exchange_one_number_every_k_th_call():
    calls = [("all_reduce", f"sum Float32[{i}]") for i in range(12)]
    for every, wanted in ((1, 12), (4, 3), (5, 2), (0, 0)):
        raised, gathered = run([calls] * 3, every)
        assert raised == [None] * 3 and gathered == wanted


@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_first_call_that_differs_is_named_on_every_rank(every):
    usual = [("all_reduce", f"sum Float32[{i}]") for i in range(8)]
    odd = [*usual[:5], ("all_gather", "Float32[3]"), *usual[6:]]
    raised, _ = run([usual, usual, odd], every)
    for e in raised:
        text = str(e)
        assert "rank(s) 2 made another call" in text and "rank 2: all_gather Float32[3]" in text, text
        assert "rank 0: all_reduce sum Float32[5]" in text and text.count("test_agree.py:") == 3


def test_how_often_comes_from_the_environment(monkeypatch):
    assert check_every(64) == 64
    monkeypatch.setenv("MS_DTENSOR_CHECK_EVERY", "7")
    assert check_every(64) == 7
    monkeypatch.setenv("MS_DTENSOR_CHECK_EVERY", "often")
    with pytest.raises(ConfigError, match="no number of collectives"):
        check_every(1)
