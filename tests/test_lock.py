"""requirements.lock has all that requirements.txt and requirements-extras.txt bring, with checksums of PyPI's files."""

import os
import re
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = ("requirements.txt", "requirements-extras.txt")
LOCK = (ROOT / "requirements.lock").read_text()
ENTRIES = re.findall(r"^(\S+==.*?)((?: \\\n    --hash=\S+)*)$", LOCK, re.MULTILINE)
LOCKED = [Requirement(entry) for entry, _ in ENTRIES]


def asked_for():
    lines = [re.sub(r"\s*#.*", "", line) for name in FILES for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


def versions(**environment):
    """Of every package that the lock gives this environment, its one version."""
    found = [(canonicalize_name(r.name), r) for r in LOCKED if r.marker is None or r.marker.evaluate(environment)]
    assert len(found) == len(dict(found))
    return {name: next(iter(requirement.specifier)).version for name, requirement in found}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_it_has_all_that_is_asked_for_in_a_version_that_will_do(python, machine):
    environment = dict(python_version=python, python_full_version=f"{python}.1", platform_machine=machine)
    locked = versions(**environment, sys_platform="linux", platform_system="Linux")
    requirements = asked_for()
    assert {"torch", "pytest", "transformers"} <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def holds(requirement, extras):
    return requirement.marker is None or any(requirement.marker.evaluate(dict(extra=x)) for x in ("", *extras))


def test_it_has_what_these_need_in_turn():
    """As far as the packages that are installed here are those of the lock."""
    installed = {canonicalize_name(x.metadata["Name"]): x for x in distributions()}
    locked, seen, left = versions(), set(), [x for x in asked_for() if holds(x, ())]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        assert name in locked, requirement
        if name not in seen and name in installed and installed[name].version == locked[name]:
            seen.add(name)
            left += [x for x in map(Requirement, installed[name].requires or ()) if holds(x, requirement.extras)]
    assert "numpy" in seen or installed["numpy"].version != locked["numpy"]


def test_every_file_has_checksums_and_no_build_is_of_one_machine():
    assert len(ENTRIES) > 100
    assert all(re.fullmatch(r"( \\\n    --hash=sha256:[0-9a-f]{64})+", found) for _, found in ENTRIES)
    rest = re.sub(r"^\S+==.*?(?: \\\n    --hash=\S+)*\n", "", LOCK, flags=re.MULTILINE)
    assert all(line.startswith("#") for line in rest.splitlines())  # no index, folder or link
    assert "+" not in "".join(entry for entry, _ in ENTRIES)  # which builds like 2.13.0+cpu have in their versions


def test_older_pips_get_the_one_that_checks_from_it(tmp_path):
    """What scripts/setup.sh takes out of the lock for that."""
    (line,) = re.findall(r"<\((sed .*?)\)", (ROOT / "scripts" / "setup.sh").read_text())
    taken = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (entry, checksums), = [found for found in ENTRIES if found[0].startswith("pip==")]
    assert taken == f"{entry}{checksums}\n" and int(entry[5:7]) >= 26


@pytest.mark.parametrize("words, code, says", [([], 2, "uv makes the lock: pip install uv"), (["-h"], 0, "on PyPI")])
def test_its_command_says_what_it_needs(tmp_path, words, code, says):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "lock.sh", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "sed", "env"):
        os.symlink(shutil.which(name), tmp_path / "bin" / name)
    command = [shutil.which("bash"), tmp_path / "scripts" / "lock.sh", *words]
    done = subprocess.run(command, env=dict(PATH=str(tmp_path / "bin")), capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("\n") == 1 or words
