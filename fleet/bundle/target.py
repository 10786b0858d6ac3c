"""A target: the architecture and Python that wheels must fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags

OLDEST_GLIBC_MINOR = 31
"""glibc 2.31 is the oldest that boxes have (Debian 11, Ubuntu 20.04 of JetPack 5): wheels may ask for no newer one."""
FIRST_MANYLINUX_GLIBC_MINOR = 17  # PEP 599: manylinux2014
LEGACY_PLATFORMS = {"x86_64": ("manylinux2014", "manylinux2010", "manylinux1"), "aarch64": ("manylinux2014",)}


@dataclass(frozen=True)
class Target:
    """Wheels for it lie in `wheels/<name>`.

    Attributes:
        architecture: as `uname -m` prints it, x86_64 or aarch64.
        python: major and minor version of CPython, e.g. "3.11".
    """

    architecture: str
    python: str

    @property
    def version(self) -> tuple[int, int]:
        """(3, 11) for "3.11"."""
        major, minor = self.python.split(".")[:2]
        return int(major), int(minor)

    @property
    def name(self) -> str:
        """E.g. linux_x86_64-cp311."""
        return f"linux_{self.architecture}-cp{self.version[0]}{self.version[1]}"

    @property
    def platforms(self) -> tuple[str, ...]:
        """Platform tags of usable wheels, best first. `linux_*` is what vendors (Jetson) call their own builds."""
        minors = range(OLDEST_GLIBC_MINOR, FIRST_MANYLINUX_GLIBC_MINOR - 1, -1)
        modern = tuple(f"manylinux_2_{minor}_{self.architecture}" for minor in minors)
        legacy = tuple(f"{name}_{self.architecture}" for name in LEGACY_PLATFORMS[self.architecture])
        return (*modern, *legacy, f"linux_{self.architecture}")

    @property
    def tags(self) -> tuple[Tag, ...]:
        """Every tag of a usable wheel, best first."""
        interpreter = f"cp{self.version[0]}{self.version[1]}"
        return (
            *cpython_tags(self.version, platforms=self.platforms),
            *compatible_tags(self.version, interpreter, self.platforms),
        )

    @property
    def pip_options(self) -> tuple[str, ...]:
        """What makes pip choose wheels for this target instead of the machine it runs on."""
        options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python]
        for platform in self.platforms:
            options += ["--platform", platform]
        return tuple(options)

    @property
    def marker_environment(self) -> dict[str, str]:
        """Values of PEP 508 markers on the boxes; kernel release and version are not known in the office."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.architecture,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def applying(self, requires: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
        """The requirements of a wheel's metadata that apply on this target with these extras."""
        wanted = ("", *extras)
        for line in requires:
            requirement = Requirement(line)
            environments = [{**self.marker_environment, "extra": extra} for extra in wanted]
            if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
                yield requirement
