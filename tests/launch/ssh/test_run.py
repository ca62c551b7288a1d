"""What a launcher keeps of what its hosts tell."""

from tfdist_cli.launch.ssh.run import keep_metrics


def test_metrics_here_are_those_of_the_host(tmp_path):
    path, lost = tmp_path / "metrics.jsonl", tmp_path / "metrics_lost.jsonl"
    keep_metrics(path, b"1\n2\n", anew=True)
    keep_metrics(path, b"3\n4\n", anew=False)
    assert path.read_bytes() == b"1\n2\n3\n4\n"
    keep_metrics(path, b"1\n2\n3\n4\n5\n", anew=True)
    assert path.read_bytes() == b"1\n2\n3\n4\n5\n", "the host was reached again"
    assert not lost.exists()
    keep_metrics(path, b"1\n2\n3b\n", anew=True)
    keep_metrics(path, b"1\n", anew=True)
    assert path.read_bytes() == b"1\n"
    assert lost.read_bytes() == b"3\n4\n5\n2\n3b\n", "training has gone back to a checkpoint"
