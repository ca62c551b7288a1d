"""The index of a dynamic table gives each id one row, and rows of little use to new ids."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.tables.hashing import GROUP, WAYS, unhashed
from tfdist_cli.train.layers import row_index
from tfdist_cli.train.layers.initial_rows import InitialRows
from tfdist_cli.train.layers.row_index import RowIndex, RowPolicy
from tfdist_cli.train.layers.row_keys import buckets_of, hashed, homes_of, read, slot_of, written

pytestmark = pytest.mark.slow

WIDTH = 2
PLAIN = RowPolicy()
CANDIDATES = 2 * WAYS


def index(groups=1, policy=PLAIN, initializer=None):
    table = keras.Variable(np.zeros((groups * GROUP, WIDTH), np.float32), name="table")
    return RowIndex(table, InitialRows(initializer or keras.initializers.Ones(), WIDTH), policy)


def looked_up(of, *ids, create=True):
    """The rows of ids in one lookup."""
    return of.rows(tf.constant(ids, tf.int64), create=create)[0].numpy()


def same_candidates(count):
    """Ids that all have the same candidates in a table of one group."""
    ids = np.arange(200_000, dtype=np.int64)
    buckets = buckets_of(hashed(tf.constant(ids)), tf.zeros(len(ids), tf.int32)).numpy()
    found = ids[(buckets == buckets[0]).all(axis=1)]
    assert len(found) >= count
    return found[:count].tolist()


@pytest.mark.parametrize(
    "initializer",
    [keras.initializers.RandomUniform(seed=3), keras.initializers.RandomNormal(seed=4), keras.initializers.Constant(2)],
)
@pytest.mark.parametrize("width", [4, 5])
def test_initial_rows_are_those_of_an_embedding(initializer, width):
    ids = np.array([0, 7, 49, 3])
    rows = InitialRows(initializer, width)(tf.constant(ids), tf.float32)
    np.testing.assert_allclose(rows, np.asarray(initializer((50, width), "float32"))[ids], rtol=1e-6, atol=1e-7)


def test_hashes_of_ids_have_inverses():
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789], np.int64)
    assert (unhashed(hashed(tf.constant(ids)).numpy()) == ids).all()


def test_each_id_has_one_row_until_the_table_is_four_fifths_full():
    of, ids = index(4), np.random.default_rng(0).integers(-(2**63), 2**63, 4 * GROUP * 8 // 10)
    rows = looked_up(of, *ids)
    assert len(set(rows)) == len(ids)
    assert rows.min() > 0
    assert (looked_up(of, *ids[::-1], create=False)[::-1] == rows).all()
    found, at = of.ids()
    assert dict(zip(found, at, strict=True)) == dict(zip(ids, rows, strict=True))


def test_ids_without_a_row_have_row_0():
    of = index()
    assert looked_up(of, 5, create=False).tolist() == [0]
    assert looked_up(of, 5, 5)[0] > 0


def test_a_full_table_without_eviction_is_an_error():
    of, ids = index(), same_candidates(CANDIDATES + 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is full"):
        looked_up(of, *ids)


def test_an_id_gets_the_row_where_it_is_looked_up_first_while_half_of_the_bucket_is_free():
    of, ids = index(), np.arange(GROUP // 5)
    rows = looked_up(of, *ids)
    home = homes_of(hashed(tf.constant(ids)), tf.zeros(len(ids), tf.int32)).numpy()
    free = np.array([row not in set(home[:at]) for at, row in enumerate(home)]) & (home > 0)
    assert 0.85 < free.mean() < 0.95
    assert (rows[free] == home[free]).mean() > 0.97  # the others of one lookup may have found the row taken
    assert (rows[~free] != home[~free]).all()


def test_a_bucket_that_is_half_full_leaves_new_ids_to_the_other_one():
    of, ids = index(), same_candidates(CANDIDATES)
    for each in ids:
        looked_up(of, each)
    first = buckets_of(hashed(tf.constant(ids[:1], tf.int64)), tf.zeros(1, tf.int32))[0, 0]
    in_first = [bool(row // WAYS == first) for row in looked_up(of, *ids, create=False)]
    assert abs(sum(in_first[: CANDIDATES // 2]) - WAYS // 2) <= 1


def placed(ids, rows):
    """The keys of a table of one group that has these ids in these rows."""
    keys = np.zeros(GROUP, np.int64)
    keys[rows] = hashed(tf.constant(ids, tf.int64))
    return tf.Variable(keys.reshape(-1, WAYS))


def found(keys, ids):
    given = hashed(tf.constant(ids, tf.int64))
    return slot_of(keys, given, tf.zeros(len(ids), tf.int32)).numpy().tolist()


@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("way", range(0, WAYS, 5))
def test_an_id_is_found_in_any_row_of_both_buckets(bucket, way):
    """Tables of earlier checkpoints have ids where another one is looked up first."""
    ids = np.arange(1000, 1040)
    buckets = buckets_of(hashed(tf.constant(ids, tf.int64)), tf.zeros(len(ids), tf.int32)).numpy()
    _, own = np.unique(buckets[:, bucket], return_index=True)
    ids, rows = ids[own], buckets[own, bucket] * WAYS + way
    assert found(placed(ids, rows), ids) == rows.tolist()
    unknown = [5, *ids, 6]
    assert found(placed(ids, rows), unknown) == [-1, *rows, -1]


def test_ids_are_found_where_they_are_looked_up_first_elsewhere_or_not_at_all():
    ids = np.array(same_candidates(CANDIDATES))
    first, second = buckets_of(hashed(tf.constant(ids[:1], tf.int64)), tf.zeros(1, tf.int32)).numpy()[0] * WAYS
    rows = np.concatenate([first + np.arange(WAYS), second + np.arange(WAYS)])  # both are full
    keys = placed(ids, rows)
    assert found(keys, ids) == rows.tolist()
    assert found(keys, ids[::-1]) == rows[::-1].tolist()
    home = homes_of(hashed(tf.constant(ids)), tf.zeros(len(ids), tf.int32)).numpy()
    assert set(home) <= set(rows[:WAYS])
    _, own = np.unique(home, return_index=True)
    at_home = placed(ids[own], home[own])
    assert found(at_home, ids[own]) == home[own].tolist()
    others = np.setdiff1d(ids, ids[own])
    assert found(at_home, others) == [-1] * len(others)
    assert found(at_home, []) == []


def test_the_key_of_free_rows_is_never_found():
    nothing = int(unhashed(np.zeros(1, np.int64))[0])
    assert found(placed([7], [3]), [nothing, nothing]) == [-1, -1]


def test_a_new_id_replaces_no_row_that_the_same_lookup_uses():
    of, ids = index(policy=RowPolicy(evict="lfu")), same_candidates(CANDIDATES + 1)
    *often, rare = ids[:CANDIDATES]
    for _ in range(2):
        looked_up(of, *often)
    row = looked_up(of, rare)[0]
    rows = looked_up(of, rare, ids[CANDIDATES])
    assert rows[0] == row
    assert rows[1] not in {0, row}


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_new_id_replaces_the_one_of_least_use(evict):
    of, ids = index(policy=RowPolicy(evict=evict)), same_candidates(CANDIDATES + 2)
    *first, old, new = ids[: CANDIDATES - 1] + ids[-2:]
    for each in (old, *first, *first[:-1]):  # `old` is the least recent, `first[-1]` was used as often as `old`
        looked_up(of, each)
    looked_up(of, old) if evict == "lfu" else None
    gone = old if evict == "lru" else first[-1]
    row = looked_up(of, gone, create=False)
    of.table.assign(tf.fill(of.table.shape, 7.0))
    assert looked_up(of, new) == row
    assert looked_up(of, gone, create=False) == [0]
    assert (of.table.numpy()[row] == 1).all()  # its initial value


def test_rows_of_one_lookup_are_not_replaced_by_it():
    of, ids = index(policy=RowPolicy(evict="lru")), same_candidates(CANDIDATES + 3)
    rows = looked_up(of, *ids)
    assert sorted(set(rows))[0] == 0
    assert len(set(rows)) == CANDIDATES + 1  # the last ids have no row of their own


def test_rows_that_are_not_used_expire():
    of, ids = index(policy=RowPolicy(ttl=1e-6)), same_candidates(CANDIDATES + 1)
    looked_up(of, *ids[:CANDIDATES])
    assert looked_up(of, ids[CANDIDATES])[0] > 0


def test_an_id_is_admitted_at_its_nth_occurrence():
    of = index(policy=RowPolicy(admit_after=3))
    assert looked_up(of, 5, 5, 6).tolist() == [0, 0, 0]
    assert of.ids()[0].tolist() == []
    assert looked_up(of, 5)[0] > 0
    assert looked_up(of, 6, 5, create=False).tolist() == [0, looked_up(of, 5)[0]]
    assert of.ids()[0].tolist() == [5]


def test_the_count_of_uses_ends_before_its_type_does():
    of = index(policy=RowPolicy(admit_after=2))
    looked_up(of, 5, 5, 6)
    of.count.assign(tf.where(of.count.value > 0, 2**30 - 1, 0))
    for _ in range(2):
        assert looked_up(of, *[5] * 9, 6)[-1] > 0
    assert of.count.numpy().max() == 2**30
    assert sorted(of.ids()[0].tolist()) == [5, 6]


def test_workers_that_meet_the_same_new_ids_get_the_same_rows(monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    of, found = index(8), []
    look_up = tf.function(lambda ids: of.rows(ids, create=True)[0], input_signature=[tf.TensorSpec([None], tf.int64)])
    batches = [tf.range(start, start + 256, dtype=tf.int64) for start in range(0, 5000, 128)]

    def work():
        found.append([look_up(batch).numpy() for batch in batches])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for rows in zip(*found, strict=True):
        assert all((each == rows[0]).all() for each in rows)
    assert sorted(of.ids()[0]) == list(range(int(batches[-1][-1]) + 1))


@pytest.mark.parametrize("policy", [PLAIN, RowPolicy(admit_after=2), RowPolicy(evict="lru")])
def test_rows_are_found_where_they_are_and_ids_without_one_share_row_0(policy):
    of = index(2, policy)
    ids = tf.constant([7, 8, 7, 9], tf.int64)
    for create in (True, True, False):
        found = of.fetch(ids, create=create)
        (rows,) = found.rows
        expected = of.rows(ids, create=False)[0]
        if len(expected.numpy().nonzero()[0]):
            np.testing.assert_array_equal(tf.gather(rows, found.positions), expected)
        assert len(set(rows.numpy())) == found.counts[0] == len(rows)
    unknown = of.fetch(tf.constant([1000, 7], tf.int64), create=False)
    assert tf.gather(unknown.rows[0], unknown.positions).numpy().astype(bool).tolist() == [False, True]


def test_the_id_whose_hash_marks_free_rows_never_has_one():
    of, ids = index(), [int(unhashed(np.zeros(1, np.int64))[0]), 5]
    for _ in range(2):
        assert (looked_up(of, *ids) > 0).tolist() == [False, True]


def test_a_row_that_is_used_while_it_is_taken_keeps_its_id(monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    monkeypatch.setattr(row_index, "GRACE_SECONDS", 0.0)
    of, ids = index(policy=RowPolicy(evict="lru")), same_candidates(CANDIDATES)
    looked_up(of, *ids)
    (shard,) = of._shards
    rows = tf.constant(looked_up(of, *ids[:2]))
    keys, long_ago = hashed(tf.constant(ids[:2], tf.int64)).numpy(), 1
    written(shard.used, rows[:1], tf.constant([long_ago], tf.int64))
    taken, _ = of._claimed(shard, rows, rows, tf.constant(long_ago + 1, tf.int64))
    assert taken.numpy().tolist() == rows[:1].numpy().tolist()
    assert read(shard.keys, rows).numpy().tolist() == [0, keys[1]]
