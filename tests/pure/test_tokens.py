# SPDX-License-Identifier: Apache-2.0
"""The order of tokens: a partition with equal counts, equal work, few rows; who needs which keys, against all pairs."""
import numpy as np
import pytest

from ms_dtensor.core.balance import Mask
from ms_dtensor.core.tokens import Tokens, balance, head_tail, in_order, keys_by_rank, shard_sizes
from ms_dtensor.errors import ConfigError
from tests.calls import calls


def packing(rng, n, median=1000.0, sigma=1.2):
    docs = []
    while sum(docs) < n:
        docs.append(min(max(1, int(rng.lognormal(np.log(median), sigma))), n - sum(docs)))
    return docs


def seen(tokens, causal, window):
    """bool[n, n] of the documents in order: query i sees key j."""
    doc = np.repeat(np.arange(len(tokens.documents)), tokens.documents)
    at = np.concatenate([np.arange(n) for n in tokens.documents] or [np.zeros(0, int)])
    out = doc[:, None] == doc
    if causal:
        out &= at[:, None] >= at
    return out & (at[:, None] - at < window) if window else out


@pytest.mark.parametrize("seed", range(60))
def test_any_order_is_a_partition_and_its_tables_are_the_mask(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 9)) if seed % 3 else (2, 2)
    docs = packing(rng, int(rng.integers(1, 400)), rng.uniform(1, 80), rng.uniform(.1, 2))
    docs.insert(0, 0)
    causal, window = [(True, None), (True, int(rng.integers(1, 40))), (False, None)][seed % 3]
    for tokens in (balance(docs, ranks, window=window, causal=causal), head_tail(docs, ranks), in_order(docs, ranks)):
        n, mask = sum(docs), seen(tokens, causal, window)
        assert sorted(tokens.index().tolist()) == list(range(n)) and len(tokens) == n
        sizes = shard_sizes(n, *((ranks,) if isinstance(ranks, int) else ranks))
        assert tuple(len(tokens.index(r)) for r in range(tokens.ranks)) == sizes
        x = rng.normal(size=n)
        np.testing.assert_array_equal(tokens.restore(x[tokens.index()]), x)
        at = np.concatenate([np.arange(k) for k in docs])
        np.testing.assert_array_equal(tokens.places(), at[tokens.index()])
        for r, keys in enumerate(keys_by_rank(tokens, Mask(causal, window))):
            mine = tokens.index(r)
            need = np.flatnonzero(mask[mine].any(0)) if len(mine) else mine
            got = np.concatenate([tokens.index(s)[rows] for s, rows in enumerate(keys.rows)])
            assert sorted(got.tolist()) == need.tolist()  # each key that is seen once, and no other
            assert tokens.work(r, causal=causal, window=window) == mask[mine].sum()
            assert tokens.rows_needed(r, causal=causal, window=window) == len(set(need.tolist()) - set(mine.tolist()))
            first = np.cumsum([0, *docs])
            want = [np.arange(first[d] + lo, first[d] + hi) for (d, *_), (lo, hi) in zip(tokens.runs[r], keys.spans)]
            np.testing.assert_array_equal(got[keys.order], np.concatenate(want) if want else [])


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_fifty_packings_are_level_and_send_a_third_of_a_ring(ranks):
    n, ratios, rows = 16384, [], []
    for seed in range(50):
        tokens = balance(packing(np.random.default_rng(seed), n), ranks)
        work = [tokens.work(r) for r in range(ranks)]
        assert set(tokens.sizes) == {n // ranks}
        ratios.append(max(work) * ranks / sum(work))
        rows.append(sum(map(tokens.rows_needed, range(ranks))) / (n * (ranks - 1)))
    assert max(ratios) <= 1.01, max(ratios)
    assert np.mean(rows) <= 0.31, np.mean(rows)


def test_a_long_document_is_level_and_sends_less_than_a_ring():
    for ranks in (4, 8):
        tokens = balance((16384,), ranks)
        work = [tokens.work(r) for r in range(ranks)]
        assert max(work) * ranks / sum(work) <= 1.01
        assert sum(map(tokens.rows_needed, range(ranks))) / (16384 * (ranks - 1)) <= 0.8


def test_the_cost_is_per_run_not_per_token():
    """A search of all pairs of runs makes millions of calls; one for every token, a million."""
    rng = np.random.default_rng(2)
    for docs in (packing(np.random.default_rng(1), 1 << 20, 4000.0), rng.integers(1, 400, 5000).tolist()):
        assert calls(lambda docs=docs: balance(docs, 16)) < 500_000
        assert len(balance(docs, 16)) == sum(docs)


def test_what_is_no_order_is_refused():
    for runs in ((((0, 0, 4),), ((0, 5, 8),)), (((0, 0, 4),), ((0, 3, 8),)), (((0, 0, 4),), ((1, 0, 4),))):
        with pytest.raises(ConfigError, match="the runs are not the documents"):
            Tokens((8,), runs)
    with pytest.raises(ConfigError, match=r"tokens \[3, 5\], rows \[4, 4\]"):
        Tokens((8,), (((0, 0, 3),), ((0, 3, 8),)))
    with pytest.raises(ConfigError, match="no such mask"):
        balance((8,), 2, window=3, causal=False)
    with pytest.raises(ConfigError, match="0.* ranks cannot have"):
        balance((8,), 0)
    for documents in ((3, -1), (2.5,), "ab"):
        with pytest.raises(ConfigError, match="cannot have these documents"):
            balance(documents, 2)
    for documents, ranks in ((5, 2), (None, 2), ((8,), 1.5), ((8,), None), ((8,), "2"), ((8,), ())):
        with pytest.raises(ConfigError, match="cannot have these documents"):
            in_order(documents, ranks)
    for window in (1.5, "3"):
        with pytest.raises(ConfigError, match="no such mask"):
            balance((8,), 2, window=window)
    for runs in (((0, 4, 8), (0, 0, 4)), ((0, 0, 2), (1, 0, 2), (0, 2, 6))):
        with pytest.raises(ConfigError, match="the runs of a rank are not by document and place"):
            Tokens((8,) if len(runs) == 2 else (6, 2), (runs,))
    for rows in (np.zeros(7), np.zeros((1, 2)), np.float64(0)):
        with pytest.raises(ConfigError, match="rows for 8 tokens"):
            balance((8,), 2).restore(rows)
    with pytest.raises(ConfigError, match="list is no NumPy array"):
        balance((8,), 2).cut([0] * 8, mesh=None)
    with pytest.raises(ConfigError, match="an array has 3 rows for 8 tokens"):
        balance((8,), 2).cut(np.zeros(3), mesh=None)


def test_tokens_are_values():
    assert balance((30, 7), 3) == balance((30, 7), 3) and hash(balance((30, 7), 3)) == hash(balance((30, 7), 3))
    assert balance(np.array([30, 7]), np.int64(3)) == balance((30, 7), 3)
    made = balance((30, 7), 3)
    assert Tokens(list(made.documents), [[list(run) for run in rank] for rank in made.runs]) == made
    assert balance((30, 7), 3) != in_order((30, 7), 3)
    assert "document 1, 7 tokens  " in balance((30, 7), 3).explain()
