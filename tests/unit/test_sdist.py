"""The source distribution has every file of the repository, so that its tests, docs and examples are whole."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="source distributions are made by build")
ROOT = Path(__file__).parents[2]


def test_sdist_has_every_file_of_the_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which files there are")
    tracked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                             capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {name for name in tracked if (ROOT / name).exists()}
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT], check=True,
                   capture_output=True)
    made, = tmp_path.glob("lowbit_attn-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert len(wanted) > 200 and not wanted - names
    own = {name for name in names - wanted if name not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in name}
    assert not own, f"{sorted(own)} are no files of the repository"
