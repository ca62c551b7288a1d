"""What tasks of each role do under each strategy."""

import pytest

from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.strategies import (
    STRATEGIES,
    computes_gradients,
    core_use,
    decides,
    holds_variables,
    infer_strategy,
    is_replaceable,
    joins_cluster,
    may_join,
    may_leave,
    serves,
)

DATA = {"data_dispatcher", "data_worker"}


@pytest.mark.parametrize(
    ("question", "coordinated", "mirrored", "staged"),
    [
        (decides, {"chief"}, {"chief", "worker"}, {"chief"}),
        (serves, {"worker", "ps", *DATA}, DATA, {"worker", "ps", *DATA}),
        (computes_gradients, {"worker"}, {"chief", "worker"}, {"worker"}),
        (holds_variables, {"ps"}, {"ps"}, {"worker", "ps"}),
        (is_replaceable, {"worker", "evaluator"}, {"evaluator"}, {"evaluator"}),
        (joins_cluster, {"worker"}, set(), set()),
        (may_join, {"worker", "evaluator", "data_worker"}, {"evaluator", "data_worker"}, {"evaluator", "data_worker"}),
        (may_leave, {"worker", "evaluator", "data_worker"}, {"evaluator"}, {"evaluator"}),
        (
            core_use,
            {"worker", "ps", "data_worker"},
            {"chief", "worker", "ps", "data_worker"},
            {"worker", "ps", "data_worker"},
        ),
    ],
)
def test_what_roles_do(question, coordinated, mirrored, staged):
    for strategy, traits in STRATEGIES.items():
        expected = staged if traits.staged else coordinated if traits.coordinated else mirrored
        assert {role for role in ROLES if question(strategy, role)} == expected


@pytest.mark.parametrize(
    ("roles", "strategy"),
    [
        (["chief", "ps", "worker"], "parameter_server"),
        (["chief", "worker"], "multi_worker_mirrored"),
        (["worker", "worker", "evaluator"], "multi_worker_mirrored"),
        (["chief", "evaluator", *DATA], "single"),
        ([], "single"),
    ],
)
def test_a_strategy_follows_from_the_roles(roles, strategy):
    assert infer_strategy(roles) == strategy


def test_roles_of_the_data_service_need_each_other():
    assert {role: traits.needs for role, traits in ROLES.items() if traits.needs} == {
        "data_dispatcher": "data_worker",
        "data_worker": "data_dispatcher",
    }
