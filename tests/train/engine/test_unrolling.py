from tfdist_cli.train.engine.unrolling import FIRST_OPERATIONS, unrolled_steps

SMALL = FIRST_OPERATIONS // 20


def test_small_models_start_with_all_steps():
    assert unrolled_steps(10, SMALL, 0) == 10


def test_large_models_start_with_single_steps():
    assert unrolled_steps(10, FIRST_OPERATIONS, 0) == 1
    assert unrolled_steps(10, 100 * FIRST_OPERATIONS, 0) == 1


def test_others_start_with_a_divisor_so_that_executions_end_with_epochs():
    assert unrolled_steps(10, FIRST_OPERATIONS // 4, 0) == 2
    assert unrolled_steps(12, FIRST_OPERATIONS // 4, 0) == 4
    assert unrolled_steps(7, FIRST_OPERATIONS // 4, 0) == 1


def test_all_steps_are_unrolled_once_that_pays():
    sizes = [unrolled_steps(10, 5000, done) for done in range(0, 200_000, 10)]
    assert sizes[0] == 1
    assert sizes[-1] == 10
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 10}
    assert sizes.index(10) * 10 > 50_000


def test_a_single_step_stays_single():
    assert unrolled_steps(1, SMALL, 10**9) == 1
