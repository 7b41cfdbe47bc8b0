"""benchmarks/fit_select.py: what it measures and fits; what select loses by the committed times."""

import math
import statistics

import fit_select
import pytest
import report
import torch

import torch_sgemm as ts


def shapes():
    return fit_select.by_shape(report.read_csv(fit_select.FILE))


@pytest.mark.parametrize(("name", "most"), [("fitted", 1.03), ("held out", 1.05)])
def test_what_select_takes_is_near_the_fastest(name, most):
    """The geometric mean of its time over the fastest candidate's; by the times that were measured,
    and what select predicts now."""
    losses = fit_select.losses(fit_select.of_set(shapes(), name))
    assert len(losses) >= 80
    assert statistics.geometric_mean(losses.values()) <= most, fit_select.text(shapes())


def test_a_model_that_takes_the_slowest_loses_more():
    some = dict(list(fit_select.of_set(shapes(), "fitted").items())[:40])
    before = fit_select.score(some)
    old = fit_select.set_constant("launch", 1.0)  # a second: all kernels seem alike
    try:
        assert fit_select.score(some) > before
    finally:
        fit_select.set_constant("launch", old)
    assert fit_select.score(some) == before


def test_an_unknown_constant_is_told():
    with pytest.raises(ValueError, match="no constant 'lunch'"):
        fit_select.get_constant("lunch")
    assert math.isfinite(fit_select.get_constant("ring256x128"))


def test_random_shapes_are_the_same_for_a_seed_and_not_too_large():
    some = fit_select.random_shapes(20, seed=3)
    assert some == fit_select.random_shapes(20, seed=3) != fit_select.random_shapes(20, seed=4)
    assert all(shape.work <= fit_select.LARGEST for shape in some)


def test_each_kernel_is_timed_once_and_rings_with_shared_tiles_too():
    plans = fit_select.worth_timing(ts.plan.candidates((1000, 1000), (1000, 1000)))
    assert len({(p.kernel, p.streamed) for p in plans}) == len(plans) <= fit_select.MOST


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--count", "-1"], "--count must not be negative, got -1")]
)
def test_a_mistake_on_the_command_line_is_told(arguments, message, capsys):
    with pytest.raises(SystemExit):
        fit_select.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_candidates_of_a_shape_are_timed():
    shape = fit_select.suite.Shape("square", "300", "mm", "nn", 1, 300, 300, 300)
    rows = fit_select.measure(shape, "cuda", 2)
    assert len(rows) > 3
    assert all(0 < row["time_us"] < 1e4 for row in rows)
    torch.cuda.synchronize()
