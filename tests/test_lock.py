"""requirements.lock has all that requirements.txt and requirements-extras.txt need, with checksums of PyPI's files."""

import re

from commands import ROOT, parametrize
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = (ROOT / "requirements.lock").read_text()
ENTRY = re.compile(r"^(\S+==.*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
TEXT = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-extras.txt"))
REQUIREMENTS = [Requirement(line) for line in re.sub(r"\s*#.*", "", TEXT).split("\n") if line]


@parametrize("machine", ["x86_64", "aarch64"])
@parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_requirement_is_locked_once_in_a_version_that_satisfies_it(python, machine):
    environment = dict(python_version=python, python_full_version=f"{python}.1", platform_machine=machine)
    environment |= dict(sys_platform="linux", platform_system="Linux")
    locked = {}
    for entry, _ in ENTRY.findall(LOCK):
        package = Requirement(entry)
        if package.marker is None or package.marker.evaluate(environment):
            (version,) = package.specifier
            assert locked.setdefault(canonicalize_name(package.name), version) is version
    assert len(REQUIREMENTS) > 10
    for requirement in REQUIREMENTS:
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)].version), requirement


def test_every_file_has_checksums_and_no_build_is_for_one_machine():
    assert len(ENTRY.findall(LOCK)) > 100
    assert all(line.startswith("#") for line in ENTRY.sub("", LOCK).splitlines())  # no index, folder or link
    assert "+" not in re.sub(r"[#;].*", "", LOCK)  # as in 2.13.0+cpu
