"""requirements.lock has all that requirements.txt and requirements-extras.txt need, with checksums of PyPI's files."""

import re
import subprocess

import pytest
from commands import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = (ROOT / "requirements.lock").read_text()
ENTRIES = re.findall(r"^(\S+==.*?)((?: \\\n    --hash=\S+)*)$", LOCK, re.MULTILINE)
LOCKED = [Requirement(entry) for entry, _ in ENTRIES]
TEXT = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-extras.txt"))
REQUIREMENTS = [Requirement(line) for line in re.sub(r"\s*#.*", "", TEXT).split("\n") if line]


def locked_versions(**environment):
    """The version of every package that the lock has for this environment."""
    found = [(canonicalize_name(r.name), r) for r in LOCKED if r.marker is None or r.marker.evaluate(environment)]
    assert len(found) == len(dict(found))
    return {name: next(iter(requirement.specifier)).version for name, requirement in found}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_requirement_is_locked_in_a_version_that_satisfies_it(python, machine):
    environment = dict(python_version=python, python_full_version=f"{python}.1", platform_machine=machine)
    locked = locked_versions(**environment, sys_platform="linux", platform_system="Linux")
    assert {"torch", "pytest", "transformers"} <= {requirement.name for requirement in REQUIREMENTS}
    for requirement in REQUIREMENTS:
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_every_file_has_checksums_and_no_build_is_for_one_machine():
    assert len(ENTRIES) > 100
    assert all(re.fullmatch(r"( \\\n    --hash=sha256:[0-9a-f]{64})+", checksums) for _, checksums in ENTRIES)
    rest = re.sub(r"^\S+==.*?(?: \\\n    --hash=\S+)*\n", "", LOCK, flags=re.MULTILINE)
    assert all(line.startswith("#") for line in rest.splitlines())  # no index, folder or link
    assert "+" not in "".join(entry for entry, _ in ENTRIES)  # as in 2.13.0+cpu


def test_setup_installs_a_pip_that_checks_from_the_lock():
    (line,) = re.findall(r"<\((sed .*?)\)", (ROOT / "scripts" / "setup.sh").read_text())
    output = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ((entry, checksums),) = [found for found in ENTRIES if found[0].startswith("pip==")]
    assert output == f"{entry}{checksums}\n" and int(entry[5:7]) >= 26
