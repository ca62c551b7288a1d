"""Containers without a registry: an empty image, into which this machine's programs are mounted."""

import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

IMAGE = "localhost/tfdist-lab"
ROOT = Path(__file__).parents[3]
_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var")
_LINKS = ("bin", "lib", "lib32", "lib64", "sbin")


def engine():
    """The first container engine that answers; None if none does. A docker client needs its daemon."""
    return next(filter(_answers, filter(None, map(shutil.which, ("podman", "docker")))), None)


def _answers(program):
    return subprocess.run([program, "info"], capture_output=True, timeout=60, check=False).returncode == 0


def volumes():
    """The mounts with which a container runs this interpreter and this tfdist."""
    # A virtual environment may name folders outside itself.
    needed = [
        Path(path) for path in ("/usr", sys.prefix, sys.base_prefix, ROOT, *sys.path) if path and Path(path).is_dir()
    ]
    outermost = [path for path in dict.fromkeys(needed) if not set(path.parents) & set(needed)]
    return [f"{path}:{path}:ro" for path in outermost]


def settings(program, folder):
    """Variables with which the engine runs a container here: none, or podman's with lower limits.

    Returns:
        The variables, and the reason why no container runs even with them; None if one does.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], 32768)
    path = folder / "containers.conf"
    path.write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    reason = None
    for variables in ({}, {"CONTAINERS_CONF": str(path)}):
        reason = _make_image(program, {**os.environ, **variables})
        if reason is None:
            return variables, None
    return {}, reason


def _make_image(program, env):
    """Builds the image and runs it once. Returns why that fails, or None."""
    path = f"ENV PATH={Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
    change = ["--change", path, "--change", f"ENV PYTHONPATH={ROOT}"]
    mounts = [part for volume in volumes() for part in ("--volume", volume)]
    for arguments in (["import", *change, "-", IMAGE], ["run", "--rm", "--init", *mounts, IMAGE, "true"]):
        done = subprocess.run([program, *arguments], input=_root(), capture_output=True, env=env, check=False)
        if done.returncode:
            return done.stderr.decode().strip().rpartition("\n")[2]
    return None


def _root():
    """An archive of the folders of a root file system, and of this machine's links into /usr."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        for name in _LINKS:
            if Path("/", name).is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, str(Path("/", name).readlink())
                archive.addfile(link)
    return data.getvalue()
