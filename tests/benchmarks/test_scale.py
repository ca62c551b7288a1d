"""The model of `benchmarks.scale`: its costs are derived from measurements, and its rates follow from them."""

from dataclasses import replace

import pytest

from benchmarks.scale.__main__ import main, validation
from benchmarks.scale.constants import COSTS
from benchmarks.scale.model import Costs, Size, predict, throughput
from benchmarks.scale.observations import Observation, fit, read, save

MADE_UP = Costs(
    chief=0.5,
    ps=1.5,
    ps_per_server=0.25,
    worker=3.0,
    worker_per_server=0.75,
    chief_idle=0.125,
    ps_idle=2.0,
    worker_idle=1.0,
    launcher=0.5,
)


def observed(workers, ps, wait, rate, costs=MADE_UP):
    """What a training costs if the model is right."""
    return Observation(
        workers,
        ps,
        wait,
        rate,
        chief=costs.chief * rate + costs.chief_idle * workers,
        servers=(costs.ps + costs.ps_per_server * ps) * rate + costs.ps_idle * ps,
        computing=(costs.worker + costs.worker_per_server * ps) * rate + costs.worker_idle * workers,
        launcher=costs.launcher * (1 + ps + workers),
        others=0.0,
    )


SEEN = [observed(2, 1, 100, 18.0), observed(8, 1, 100, 70.0), observed(8, 2, 200, 38.0), observed(8, 4, 200, 37.0)]
SEEN += [observed(16, 1, 1000, 15.0)]


def test_costs_are_derived_from_observations():
    found = fit(SEEN)
    for name, cost in vars(MADE_UP).items():
        assert getattr(found, name) == pytest.approx(cost), name


def test_no_cost_is_negative():
    falling = [observed(workers, 1, 100, rate) for workers, rate in ((2, 18.0), (8, 70.0))]
    falling = [replace(each, chief=100.0 - each.rate) for each in falling]
    costs = fit([*falling, *SEEN[2:]])
    assert min(vars(costs).values()) >= 0


def test_observations_are_kept_in_a_file(tmp_path):
    path = tmp_path / "observations.jsonl"
    assert read(path) == []
    for each in SEEN:
        save(path, each)
    assert read(path) == SEEN


def test_one_worker_never_waits_for_another():
    assert throughput(1, 90.0, [8.0, 2.0]) == pytest.approx(10.0)


def test_many_workers_are_limited_by_the_busiest_part():
    assert throughput(1000, 90.0, [8.0, 2.0]) == pytest.approx(125.0)
    assert throughput(1000, 90.0, [8.0, float("inf")]) == 0.0


def test_two_workers_of_one_station_without_computation_share_it():
    assert throughput(2, 0.0, [5.0]) == pytest.approx(200.0)
    assert throughput(2, 10.0, [10.0]) == pytest.approx(1000 * 2 / (10 + 15))  # half of the time the other one is there


def test_a_machine_of_few_cores_is_shared_by_all_tasks():
    few, many = (predict(Size(64, 1, 500, cores=cores), MADE_UP) for cores in (0.5, 16))
    step = MADE_UP.chief + MADE_UP.ps + MADE_UP.ps_per_server + MADE_UP.worker + MADE_UP.worker_per_server
    idle = 64 * (MADE_UP.chief_idle + MADE_UP.worker_idle) + MADE_UP.ps_idle + 66 * MADE_UP.launcher
    assert few.rate == pytest.approx((500 - idle) / step, rel=0.01)
    assert few.used["cores"] == pytest.approx(1, abs=0.01)
    assert 0.98 < many.efficiency < 1
    assert predict(Size(8, 1, 500, cores=0.001), MADE_UP).rate == 0.0


def test_separate_machines_name_the_part_that_saturates():
    prediction = predict(Size(1000, 100, 500, megabytes=400, gigabits=10), MADE_UP)
    assert prediction.saturated_at["network of a ps"] == pytest.approx(10e9 / 8 / 4e6)
    busiest = max(prediction.used, key=prediction.used.get)
    assert prediction.rate <= prediction.saturated_at[busiest]
    slow_chief = predict(Size(1000, 100, 500), replace(MADE_UP, chief=5.0))
    assert max(slow_chief.used, key=slow_chief.used.get) == "chief"
    assert slow_chief.rate == pytest.approx(slow_chief.saturated_at["chief"], rel=0.01)


def test_more_workers_never_slow_a_cluster_down_where_each_has_a_machine():
    costs = replace(COSTS, chief_idle=0.0)
    rates = [predict(Size(workers, 4, 100), costs).rate for workers in (1, 2, 4, 8, 16, 64, 256)]
    assert rates == sorted(rates)


def test_a_table_of_predicted_and_measured_rates():
    rate = predict(Size(8, 1, 100, cores=2), MADE_UP).rate
    table = validation([replace(observed(8, 1, 100, rate), others=0.0)], MADE_UP)
    assert "| 8 | 1 | 100 ms |" in table


def test_the_command_predicts(capsys):
    main(["--predict", "--workers", "1000", "--ps", "100"])
    printed = capsys.readouterr().out
    assert "100 ps" in printed.splitlines()[0]
    assert "chief: " in printed
    assert f"launcher: {1101 * COSTS.launcher / 1000:.0%} of a core" in printed


def test_the_command_simulates(capsys):
    main(["--simulate", "--tasks", "8", "--hours", "0.02", "--seeds", "2"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert printed[-1].startswith("every invariant held")
