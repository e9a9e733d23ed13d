"""The lists of benchmark cases."""

import pytest

from perf.cases import HEADLINE, MODELS, ROUTINGS, end_rows_of, split_rows

#: (N, K) of both layers and experts of a rank, from the models' cards.
PUBLISHED = {
    ("DeepSeek-V3", "up"): (32, 4096, 7168),
    ("DeepSeek-V3", "down"): (32, 7168, 2048),
    ("Mixtral-8x7B", "up"): (8, 28672, 4096),
    ("Qwen3-30B-A3B", "up"): (128, 1536, 2048),
    ("Qwen3-235B-A22B", "down"): (16, 4096, 1536),
    ("gpt-oss-120b", "up"): (128, 5760, 2880),
    ("Kimi-K2", "up"): (48, 4096, 7168),
    ("Llama-4-Scout", "up"): (4, 16384, 5120),
    ("Nemotron-3-Nano", "up"): (128, 1856, 2688),
    ("Nemotron-3-Nano", "down"): (128, 2688, 1856),
}


def test_shapes_are_the_models():
    shapes = {name: MODELS[name[0]].shape(name[1]) for name in PUBLISHED}
    assert {name: (s.experts, s.n, s.k) for name, s in shapes.items()} == PUBLISHED


def test_every_model_splits_over_its_ranks():
    """Check that the experts of every model split over its ranks."""
    for model in MODELS.values():
        for ranks in model.expert_parallel:
            assert model.shape("up", ranks).experts * ranks == model.experts
        assert model.top_k <= model.experts
    assert all(name in MODELS for name, _ in HEADLINE)
    with pytest.raises(ValueError, match="not a multiple"):
        MODELS["DeepSeek-V3"].shape("up", 7)
    with pytest.raises(ValueError, match="up or down"):
        MODELS["DeepSeek-V3"].shape("gate")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("groups", "rows"), [(1, 7), (8, 0), (10, 1000), (128, 130)])
def test_rows_add_up_and_are_repeatable(routing, groups, rows):
    """Check that the rows of a routing add up, and that its seed determines them."""
    sizes = split_rows(routing, groups, rows, seed=3)
    assert len(sizes) == groups and sum(sizes) == rows and min(sizes) >= 0
    assert sizes == split_rows(routing, groups, rows, seed=3)
    assert end_rows_of(sizes)[-1] == rows


def test_routings_are_what_they_say():
    """Check the distribution of each named routing."""
    rows = 100_000
    assert split_rows("balanced", 10, rows) == [rows // 10] * 10
    assert max(split_rows("hot", 16, rows)) == rows // 2
    assert split_rows("empty", 10, rows).count(0) == 3
    zipf = sorted(split_rows("zipf", 8, rows), reverse=True)
    assert zipf[0] / zipf[1] == pytest.approx(2**1.2, rel=1e-3)
    assert zipf[0] / zipf[7] == pytest.approx(8**1.2, rel=1e-3)
    assert len(set(split_rows("random", 8, rows))) > 4
    assert split_rows("zipf", 8, rows, seed=1) != split_rows("zipf", 8, rows, seed=2)


def test_rows_may_be_given():
    assert split_rows("5 0 3", 3, 8) == [5, 0, 3]
    for wrong in ("5 0 4", "5 3"):
        with pytest.raises(ValueError, match="8 rows in 3 groups"):
            split_rows(wrong, 3, 8)
    with pytest.raises(ValueError, match="routing must be one of"):
        split_rows("even", 3, 8)
