"""Intervals against known values, and reports that hide nothing."""

import pytest

from dgemma.eval.measure import (
    Case,
    Estimate,
    Measure,
    as_json,
    format_value,
    markdown,
    ratio,
    table,
    wilson,
)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (7, 10, 0.3967781, 0.8922087),
        (950, 1000, 0.9346825, 0.9618641),
    ],
)
def test_wilson_gives_known_intervals(hits: int, count: int, low: float, high: float) -> None:
    assert wilson(hits, count) == pytest.approx((low, high), abs=1e-4)
    # The definition: at its ends the observed share is just 1.96 standard deviations away.
    for end in wilson(hits, count):
        away = abs(hits / count - end)
        assert away == pytest.approx(1.959964 * (end * (1 - end) / count) ** 0.5, abs=1e-6)


def test_a_share_of_nothing_is_unknown() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    measure = Case("t").share("s", [])
    assert measure.value is None and measure.note == "no case"


def test_a_ratio_of_ones_is_a_mean_with_its_usual_error() -> None:
    value, error = ratio([(1.0, 1.0), (2.0, 1.0), (6.0, 1.0)])
    assert value == pytest.approx(3.0)
    assert error == pytest.approx((7.0 / 3) ** 0.5)  # sample variance 7, three cases


def test_a_ratio_weighs_by_its_seconds_and_is_sure_of_a_constant_rate() -> None:
    value, error = ratio([(2.0, 1.0), (20.0, 10.0)])
    assert (value, error) == (2.0, 0.0)
    assert Case("t").rate("r", [(1.0, 1.0), (0.0, 9.0)], "u").value == pytest.approx(0.1)


def test_a_share_stays_within_0_and_1() -> None:
    measure = Case("t").rate("r", [(0.0, 1.0), (0.0, 1.0), (1.0, 1.0)], "share")
    assert (measure.low, measure.value) == (0.0, pytest.approx(1 / 3))
    assert Case("t").rate("r", [(0.0, 1.0), (0.0, 1.0), (1.0, 1.0)], "u").low < 0  # type: ignore[operator]


def test_an_interval_of_logarithms_becomes_one_of_factors() -> None:
    estimate = Estimate.around(0.0, 1.0, 5).exp()
    assert (estimate.value, estimate.count) == (1.0, 5)
    assert estimate.low == pytest.approx(1 / estimate.high)


MEASURES = [
    Case("fix", "diffusion").share("exact", [True, True, False, True]),
    Case("fix", "ar").share("exact", [False, False, False, False], "greedy"),
    Case("stories").estimate("ratio", Estimate(1.25, 1.0, 1.5, 7), "times"),
    Case("blimp").skipped("BLiMP.zip does not exist"),
    Case("samples", "diffusion").text("story, seed 0", "Once | upon\n```"),
]


def test_the_table_sets_modes_side_by_side_and_shows_what_was_skipped() -> None:
    lines = table(MEASURES).splitlines()
    exact = next(line for line in lines if line.startswith("fix"))
    assert exact.index("75.0 %") == lines[0].index("diffusion")
    assert exact.index("0.0 % [0.0, 49.0]") == lines[0].index("ar  ")
    assert "ar: greedy" in exact and " 4 " in exact
    assert any("skipped" in line and "BLiMP.zip does not exist" in line for line in lines)
    assert lines[-2:] == ["Once | upon", "```"]


def test_markdown_keeps_its_columns_and_fences() -> None:
    lines = markdown(MEASURES).splitlines()
    cells = [line for line in lines if line.startswith("| ")]
    assert {line.count("|") for line in cells} == {8}
    assert "````text" in lines and lines[-1] == "````"


def test_json_has_every_field() -> None:
    first = as_json(MEASURES)[0]
    assert first["value"] == 0.75 and first["count"] == 4 and first["mode"] == "diffusion"
    assert set(first) == {
        *("task", "name", "mode", "value", "low", "high", "count", "unit", "note")
    }


def test_values_are_shown_by_their_unit() -> None:
    assert format_value(Measure(task="t", name="n", value=0.5, unit="share")) == "50.0 %"
    assert (
        format_value(Measure(task="t", name="n", value=2.5, low=2.0, high=3.0))
        == "2.500 [2.000, 3.000]"
    )
    assert format_value(Measure(task="t", name="n")) == "-"
