"""The list of a chief's remote functions does not grow while workers' results are fetched."""

from tfdist_cli.train.tf_compat import coordinator


def test_more_entries_than_half_of_the_room_are_made(monkeypatch):
    entries = []
    monkeypatch.setattr(coordinator, "_register_on", entries.extend)
    for workers in (1, 2, 3, 8, 24):
        entries.clear()
        devices = [f"worker:{number}" for number in range(workers)]
        coordinator.reserve_function_table(devices)
        size = 1 << (len(entries) - 1).bit_length()  # what a list that doubles has grown to
        assert size - len(entries) >= coordinator._FUNCTIONS_PER_DEVICE * workers - workers
        assert set(entries) == set(devices)
