"""What collectives cost, how links are named, and which gradients travel together."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from xsp.errors import UsageError
from xsp.predict import collectives, training
from xsp.predict.collectives import LINKS, Algorithm, Link, link

MADE = Link("made", 2e-6, 1e-10, 3e-11)
MIB = training.MIB


def test_the_five_algorithms_cost_what_the_table_of_the_paper_says() -> None:
    alpha, beta, gamma = MADE.alpha, MADE.beta, MADE.gamma
    expected = {
        Algorithm.BINARY_TREE: (2 * alpha * 3, (2 * beta + gamma) * 3),
        Algorithm.RECURSIVE_DOUBLING: (alpha * 3, (beta + gamma) * 3),
        Algorithm.HALVING_DOUBLING: (2 * alpha * 3, 2 * beta - (2 * beta + gamma) / 8 + gamma),
        Algorithm.DOUBLE_TREE: (2 * alpha * 3, beta + gamma),
        Algorithm.RING: (14 * alpha, 14 / 8 * beta + 7 / 8 * gamma),
    }
    for algorithm, cost in expected.items():
        assert collectives.all_reduce(algorithm, MADE, 8) == pytest.approx(cost, rel=1e-12)


def test_an_all_reduce_on_a_ring_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (1, 2, 7, 64):
        whole = collectives.all_reduce_seconds(Algorithm.RING, MADE, ranks, 1e6)
        halves = collectives.scatter_seconds(MADE, ranks, 1e6), collectives.gather_seconds(MADE, ranks, 1e6)
        assert whole == pytest.approx(sum(halves), rel=1e-12)


def test_the_automatic_choice_is_a_ring_for_large_messages_and_a_tree_for_small_ones_of_many_ranks() -> None:
    free = replace(MADE, gamma=0.0)
    for ranks, size, is_ring in ((64, 1e3, False), (2, 1e9, True), (8, 1e8, True), (1000, 1e6, False)):
        auto = collectives.all_reduce_seconds(Algorithm.AUTO, free, ranks, size)
        ring = collectives.all_reduce_seconds(Algorithm.RING, free, ranks, size)
        tree = 2 * free.alpha * math.log2(ranks) + 2 * free.beta * size
        assert auto == pytest.approx(ring if is_ring else tree, rel=1e-12)


def test_no_automatic_choice_sends_fewer_bytes_than_each_rank_has_to() -> None:
    for ranks in (2, 3, 8, 64, 1024):
        for size in (1e3, 1e6, 1e9):
            bound = 2 * (ranks - 1) / ranks * MADE.beta * size
            assert collectives.all_reduce_seconds(Algorithm.AUTO, MADE, ranks, size) >= bound
    assert collectives.all_reduce_seconds(Algorithm.AUTO, MADE, 1, 1e9) == 0


def test_a_link_of_several_ranks_gives_each_its_share() -> None:
    assert MADE.shared_by(8).beta == 8 * MADE.beta
    assert MADE.shared_by(1) is MADE


@pytest.mark.parametrize(
    ("text", "alpha", "beta"),
    [
        ("5us,10GB/s", 5e-6, 1e-10),
        ("5e-6, 1e-10", 5e-6, 1e-10),
        ("1ms,25Gbit/s", 1e-3, 8 / 25e9),
        ("1ms,25Gb/s", 1e-3, 8 / 25e9),
        ("1ms,25gbyte/s", 1e-3, 1 / 25e9),
        ("20us,1GiB/s", 20e-6, 1 / (1 << 30)),
        ("3.4us,1.8TB/s", 3.4e-6, 1 / 1.8e12),
        ("2us,1.6Tbit/s", 2e-6, 8 / 1.6e12),
        ("5\N{MICRO SIGN}s,10GB/s", 5e-6, 1e-10),
        ("5\N{GREEK SMALL LETTER MU}s,10GB/s", 5e-6, 1e-10),
        ("0,0", 0.0, 0.0),
        ("0us, 0", 0.0, 0.0),
    ],
)
def test_a_link_is_given_by_latency_and_rate(text: str, alpha: float, beta: float) -> None:
    found = link(text)
    assert found.alpha == pytest.approx(alpha)
    assert found.beta == pytest.approx(beta)
    assert not found.is_quoted


def test_links_of_the_table_say_that_they_are_quoted_and_from_where() -> None:
    assert link("NVLink4") is LINKS["nvlink4"]
    assert all(each.is_quoted and "quoted" in each.description for each in LINKS.values())


def test_a_link_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"alpha_s": 1e-5, "beta_s_per_byte": 2e-10, "source": "measured on loopback"}))
    assert link(str(path)) == Link("measured", 1e-5, 2e-10, source="measured on loopback")
    assert link(str(path.rename(tmp_path / "rack 7, row 2.json"))).alpha == 1e-5


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"alpha_s": "1", "beta_s_per_byte": 1}', '{"alpha_s": -1, "beta_s_per_byte": 1}',
                '{"alpha_s": NaN, "beta_s_per_byte": 1}', '{"alpha_s": true, "beta_s_per_byte": 1}', "\x00", "[" * 9999]
)  # fmt: skip
def test_a_file_that_is_no_link_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(content)
    with pytest.raises(UsageError):
        link(str(path))


def test_a_file_without_a_limit_of_bandwidth_is_refused_and_a_link_that_costs_nothing_is_none(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text('{"alpha_s": 1e-5, "beta_s_per_byte": 0}')
    with pytest.raises(UsageError, match=r"link\.json: beta_s_per_byte is 0"):
        link(str(path))
    path.write_text('{"alpha_s": 0, "beta_s_per_byte": 0}')
    assert "unlimited bandwidth" in link(str(path)).description


@pytest.mark.parametrize(
    "text", ["nvlink", "", ",", "5us", "5us,0GB/s", "-1us,1GB/s", "nan,1", "5us,1GB/s,1,1", "1..2,1", "/tmp", "x" * 999,
             "5\N{LATIN SMALL LETTER LONG S},10GB/s", "5us,10GB/\N{LATIN SMALL LETTER LONG S}"]
)  # fmt: skip
def test_what_names_no_link_is_refused_with_what_to_give(text: str) -> None:
    with pytest.raises(UsageError):
        link(text)


@pytest.mark.parametrize("text", ["30us,10", "30us,0", "30us,1GB/s,5"])
def test_a_rate_without_its_unit_is_refused_and_not_taken_for_seconds_a_byte(text: str) -> None:
    with pytest.raises(UsageError, match="write a rate"):
        link(text)


def test_gradients_travel_in_the_buckets_that_pytorch_makes() -> None:
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    if not hasattr(dist, "_compute_bucket_assignment_by_size"):
        pytest.skip("this PyTorch has no distributed package")
    chance = random.Random(1)
    for _ in range(100):
        sizes = [4 * int(10 ** chance.uniform(0, 7)) for _ in range(chance.randint(1, 40))]
        tensors = [torch.empty(size // 4, device="meta") for size in sizes]
        for bucket, limits in ((None, [MIB, 25 * MIB]), (5 * MIB, [5 * MIB])):
            there, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(sizes))
            assert [list(each) for each in training.ddp_buckets(sizes, bucket)] == [list(each) for each in there]


def test_a_plan_of_no_gradients_has_no_buckets() -> None:
    assert training.ddp_buckets([]) == ()
