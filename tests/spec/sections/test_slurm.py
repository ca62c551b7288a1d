"""The cluster file's slurm section."""

import pytest
from pydantic import ValidationError

from tfdist_cli.spec.sections.slurm import SlurmSpec


@pytest.mark.parametrize("time", [90, "90", "90:30", "12:00:00", "1-12", "2-0:30", "7-00:00:00"])
def test_time_limits(time):
    assert SlurmSpec.model_validate({"time": time}).time == str(time)


@pytest.mark.parametrize(
    ("given", "code", "value"),
    [
        ({"time": "1h"}, "invalid-time-limit", "'1h'"),
        ({"partition": ""}, "invalid-sbatch-option", "''"),
        ({"account": "a\n#SBATCH --uid=0"}, "invalid-sbatch-option", "--uid=0"),
        ({"extra": ["mem=4G"]}, "invalid-sbatch-option", "'--name=value'"),
        ({"extra": ["--time=90"]}, "reserved-sbatch-option", "slurm.time"),
        ({"extra": ["-p gpu"]}, "reserved-sbatch-option", "slurm.partition"),
        ({"extra": ["--exclude n3"]}, "invalid-sbatch-option", "'--exclude=n3'"),
        ({"extra": ['--comment "a=b"']}, "invalid-sbatch-option", "'--comment="),
        ({"extra": ["--time 90"]}, "reserved-sbatch-option", "slurm.time"),
        ({"extra": ["-n4"]}, "reserved-sbatch-option", "--ntasks"),
        ({"extra": ["--array=1-4"]}, "reserved-sbatch-option", "--array"),
        ({"setup": ["a\0b"]}, "nul-in-value", ""),
    ],
)
def test_what_sbatch_cannot_accept_is_refused(given, code, value):
    with pytest.raises(ValidationError) as caught:
        SlurmSpec.model_validate(given)
    [details] = caught.value.errors()
    reason = details["ctx"]["error"]
    assert reason.code == code
    assert value in str(reason)


def test_other_options_are_passed_on():
    extra = ["--mem-per-cpu=4G", "--exclusive", "-x n3", "--mail-user=a b@example.org", "--comment=a -- b"]
    assert SlurmSpec.model_validate({"extra": extra}).extra == extra
