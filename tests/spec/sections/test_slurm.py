"""The cluster file's slurm section."""

import pytest
from pydantic import ValidationError

from tfdist_cli.spec.sections.slurm import SlurmSpec


@pytest.mark.parametrize("time", [90, "90", "90:30", "12:00:00", "1-12", "2-0:30", "7-00:00:00"])
def test_time_limits(time):
    assert SlurmSpec.model_validate({"time": time}).time == str(time)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"time": "1h"}, "'1h' is no time limit: write minutes"),
        ({"partition": ""}, "is empty"),
        ({"account": "a\n#SBATCH --uid=0"}, "control characters"),
        ({"extra": ["mem=4G"]}, "'mem=4G' is no option of sbatch: write it as '--name=value'"),
        ({"extra": ["--time=90"]}, "--time is set by tfdist: write it as slurm.time"),
        ({"extra": ["-p gpu"]}, "--partition is set by tfdist: write it as slurm.partition"),
        ({"extra": ["--exclude n3"]}, "'--exclude n3' is one word to sbatch: write it as '--exclude=n3'"),
        ({"extra": ['--comment "a=b"']}, "is one word to sbatch: write it as '--comment="),
        ({"extra": ["--time 90"]}, "--time is set by tfdist: write it as slurm.time"),
        ({"extra": ["-n4"]}, "--ntasks is set by tfdist: remove it"),
        ({"extra": ["--array=1-4"]}, "--array is set by tfdist: remove it"),
        ({"setup": ["a\0b"]}, "cannot hold a NUL"),
        ({"nodes": 0}, "greater than or equal to 1"),
    ],
)
def test_what_sbatch_could_not_take_is_refused(given, reason):
    with pytest.raises(ValidationError, match=reason):
        SlurmSpec.model_validate(given)


def test_other_options_are_passed_on():
    extra = ["--mem-per-cpu=4G", "--exclusive", "-x n3", "--mail-user=a b@example.org", "--comment=a -- b"]
    assert SlurmSpec.model_validate({"extra": extra}).extra == extra
