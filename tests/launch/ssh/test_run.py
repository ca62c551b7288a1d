"""Metrics that the launcher receives from a host."""

from tfdist_cli.launch.ssh.run import keep_metrics


def test_metrics_here_are_those_of_the_host(tmp_path):
    path, lost = tmp_path / "metrics.jsonl", tmp_path / "metrics_lost.jsonl"
    keep_metrics(path, b"1\n2\n", replaced=True)
    keep_metrics(path, b"3\n4\n", replaced=False)
    assert path.read_bytes() == b"1\n2\n3\n4\n"
    keep_metrics(path, b"1\n2\n3\n4\n5\n", replaced=True)
    assert path.read_bytes() == b"1\n2\n3\n4\n5\n", "after a reconnection"
    assert not lost.exists()
    keep_metrics(path, b"1\n2\n3b\n", replaced=True)
    keep_metrics(path, b"1\n", replaced=True)
    assert path.read_bytes() == b"1\n"
    assert lost.read_bytes() == b"3\n4\n5\n2\n3b\n", "after the training was restored from a checkpoint"
