"""The bytes to other ranks that the benchmarks count equal the definition."""

import numpy as np
import pytest

from benchmarks import nccl, shapes, traffic
from benchmarks.shapes import Shape

SHAPES = [Shape(9, 128, 12, top_k=3), Shape(5, 256, 8, top_k=8, routing="zipf"), Shape(1, 64, 4, top_k=1)]


def by_definition(shape, ids, of_pairs):
    """[source][destination] -> messages: pairs, or rows (one for each token and rank)."""
    n, local = len(ids), shape.experts // len(ids)
    counts = [[0] * n for _ in range(n)]
    for source, of_rank in enumerate(ids):
        for token in of_rank:
            owners = [int(e) // local for e in token]
            for owner in owners if of_pairs else set(owners):
                counts[source][owner] += 1
    return counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_bytes_against_the_definition(shape, n_ranks):
    ids = traffic.topk_ids(shape, n_ranks)
    for matrix, of_pairs in ((traffic.pairs_matrix, True), (traffic.rows_matrix, False)):
        counts = by_definition(shape, ids, of_pairs)
        assert matrix(shape, ids).tolist() == counts
        sent = [sum(counts[r][o] for o in range(n_ranks) if o != r) for r in range(n_ranks)]
        received = [sum(counts[o][r] for o in range(n_ranks) if o != r) for r in range(n_ranks)]
        assert traffic.busiest_bytes(matrix(shape, ids), 10) == 10 * max(sent + received)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids_are_distinct_and_the_same_on_every_rank_that_draws_them(shape):
    ids = traffic.topk_ids(shape, 2)
    assert all((np.diff(np.sort(i, axis=1), axis=1) > 0).all() for i in ids)
    assert all(i.shape == (shape.tokens, shape.top_k) and i.min() >= 0 and i.max() < shape.experts for i in ids)
    assert all((a == b).all() for a, b in zip(ids, traffic.topk_ids(shape, 2)))


def test_zipf_is_uneven_and_uniform_is_not():
    hot = {
        r: np.bincount(traffic.topk_ids(Shape(2000, 64, 64, routing=r), 1)[0].ravel(), minlength=64).max()
        for r in shapes.ROUTINGS
    }
    assert hot["uniform"] < 2000 * 8 / 64 * 1.3
    assert hot["zipf"] > 1500  # the most popular expert is in nearly every token


def test_payload_of_fp8_is_values_and_scales():
    assert traffic.payload_bytes(Shape(1, 7168, 8), "bf16") == 14336
    assert traffic.payload_bytes(Shape(1, 7168, 8), "fp8") == 7168 + 56 * 4


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_permutations_of_the_all_to_all_group_rows_by_expert(n_ranks):
    shape = SHAPES[0]
    ids, local = traffic.topk_ids(shape, n_ranks), shape.experts // n_ranks
    sent = [
        [(int(i.ravel()[p]), source, int(p)) for p in nccl.permutations(ids, source, local)[0]]
        for source, i in enumerate(ids)
    ]
    for rank in range(n_ranks):
        arrived = [m for messages in sent for m in messages if m[0] // local == rank]
        rows = [arrived[place] for place in nccl.permutations(ids, rank, local)[1]]
        assert [(e, s) for e, s, _ in rows] == sorted((e, s) for e, s, _ in arrived) and set(rows) == set(arrived)


@pytest.mark.parametrize("text", ["128x7168/256", "16x4096/128/4:fp8:zipf"])
def test_shapes_are_written_and_read(text):
    s = shapes.parse(text)
    assert (s.tokens, s.hidden, s.experts) in ((128, 7168, 256), (16, 4096, 128))
    assert (s.top_k, s.format, s.routing) == ((8, "bf16", "uniform") if text.startswith("128") else (4, "fp8", "zipf"))


@pytest.mark.parametrize("text", ["128", "1x2", "axb/c", "1x64/4:int4"])
def test_a_shape_that_cannot_be_read_says_how_to_write_it(text):
    with pytest.raises(ValueError, match="TOKENSxHIDDEN/EXPERTS"):
        shapes.parse(text)
