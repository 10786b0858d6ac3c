"""Where torch comes from, and whether it is the right build: judged before anything large is downloaded."""

from __future__ import annotations

import os
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from fleet.bundle.files import copy_atomically, require_free_space, sha256_file, size_text
from fleet.bundle.pip import Pip
from fleet.bundle.target import Target
from fleet.bundle.wheel_metadata import read_wheel_metadata
from fleet.errors import FleetError

OVERRIDE_VARIABLE = "TORCH_SOURCE"
CUDA_PACKAGE = re.compile(r"nvidia-.+")
HEAD_TIMEOUT_SECONDS = 10.0
SHOWN_PACKAGES = 3


@dataclass(frozen=True)
class TorchPin:
    """What a device profile asks for, the environment's override applied.

    Attributes:
        version: e.g. "2.13.0", or a vendor's full "2.4.0a0+07cecf4168.nv24.05".
        source: index, path (one wheel) or find-links (a directory of wheels).
        location: of path and find-links, absolute.
        said_by: who asked, for messages.
    """

    version: str
    source: Literal["index", "path", "find-links"]
    location: Path | None
    said_by: str


@dataclass(frozen=True)
class TorchBuild:
    """One wheel of torch, looked into but not yet fetched.

    Attributes:
        file: the wheel's file name. version: its full version.
        url: where it is; file: URLs are local.
        sha256: what the index says, None if it does not.
        requires: its Requires-Dist lines.
    """

    file: str
    version: str
    url: str
    sha256: str | None
    requires: tuple[str, ...]


def apply_override(pin: TorchPin, value: str | None) -> TorchPin:
    """`TORCH_SOURCE=DIR_OR_WHEEL` takes the place of the profile's source; the version stays.

    Raises:
        FleetError: it is set to something that does not exist.
    """
    if not value:
        return pin
    path = Path(value).expanduser().resolve()
    if path.is_dir():
        return TorchPin(pin.version, "find-links", path, OVERRIDE_VARIABLE)
    if path.is_file() and path.suffix == ".whl":
        return TorchPin(pin.version, "path", path, OVERRIDE_VARIABLE)
    raise FleetError(
        f"{OVERRIDE_VARIABLE}={value}: expected a directory of wheels or one wheel file",
        hint=f"{OVERRIDE_VARIABLE}=/path/to/wheels fleet bundle …",
    )


def satisfies(found: str, wanted: str) -> bool:
    """Whether a build is the pinned release: a plain "2.3.0" is compared by release numbers, so that 2.3.0+cpu and a
    vendor's 2.3.0a0+ebedce2.nv24.02 are that release; a pin with a suffix must match exactly."""
    try:
        have, want = Version(found), Version(wanted)
    except InvalidVersion:
        return found == wanted
    if want.local or want.is_prerelease or want.is_postrelease:
        return have == want
    length = max(len(have.release), len(want.release))
    return _padded(have.release, length) == _padded(want.release, length)


def _padded(release: tuple[int, ...], length: int) -> tuple[int, ...]:
    return release + (0,) * (length - len(release))


def find_torch(pin: TorchPin, target: Target, pip: Pip) -> TorchBuild:
    """Find the build and read its requirements; nothing large is downloaded (range requests read remote metadata).

    Raises:
        FleetError: there is no such build for the target, or it needs CUDA packages.
    """
    build = _on_index(pin, target, pip) if pin.source == "index" else _in_files(pin, target)
    refuse_cuda(build, pin, target, pip)
    return build


def _in_files(pin: TorchPin, target: Target) -> TorchBuild:
    location = pin.location
    if location is None or not location.exists():
        raise FleetError(f"torch of {pin.said_by}: {location} does not exist", hint="correct the profile's location")
    files = [location] if pin.source == "path" else sorted(location.glob("torch-*.whl"))
    ranks = {tag: rank for rank, tag in enumerate(target.tags)}
    usable: list[tuple[int, Version, Path]] = []
    for file in files:
        try:
            name, version, _, tags = parse_wheel_filename(file.name)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        fitting = [ranks[tag] for tag in tags if tag in ranks]
        if name == "torch" and fitting and satisfies(str(version), pin.version):
            usable.append((-min(fitting), version, file))
    if not usable:
        found = ", ".join(file.name for file in files) or "no torch-*.whl"
        raise FleetError(
            f"torch of {pin.said_by}: {location} has no torch {pin.version} for {target.name}; it has {found}",
            hint=f"put that wheel there, or correct {pin.said_by}'s torch version, architecture or python",
        )
    wheel = max(usable)[2]
    metadata = read_wheel_metadata(wheel)
    return TorchBuild(wheel.name, metadata.version, wheel.as_uri(), None, metadata.requires)


def _on_index(pin: TorchPin, target: Target, pip: Pip) -> TorchBuild:
    arguments = ["--no-deps", "--use-feature=fast-deps", *target.pip_options, f"torch=={pin.version}"]
    doing = f"looking for torch {pin.version} for {target.name}"
    (found,) = pip.resolve(arguments, doing)
    url = str(found["download_info"]["url"])
    metadata = found["metadata"]
    archive = found["download_info"].get("archive_info", {})
    return TorchBuild(
        file=urllib.parse.unquote(url.rsplit("/", 1)[-1]),
        version=str(metadata["version"]),
        url=url,
        sha256=archive.get("hashes", {}).get("sha256"),
        requires=tuple(metadata.get("requires_dist", [])),
    )


def cuda_packages(requirements: Iterable[Requirement]) -> list[str]:
    """Names of the CUDA runtime packages among requirements."""
    return sorted(name for name in (canonicalize_name(each.name) for each in requirements) if CUDA_PACKAGE.match(name))


def refuse_cuda(build: TorchBuild, pin: TorchPin, target: Target, pip: Pip) -> None:
    """Stop at a build that requires `nvidia-*`: it would bring gigabytes that a CPU box cannot use.

    Raises:
        FleetError: says the size and the two ways to give a CPU build.
    """
    cuda = cuda_packages(target.applying(build.requires))
    if not cuda:
        return
    own_size = remote_size_bytes(build.url)
    total = _total_size_bytes(build, pin, target, pip)
    sizes = f" ({size_text(own_size)})" if own_size is not None else ""
    with_all = f"; with all it requires {size_text(total)}" if total is not None else ""
    more = f" and {len(cuda) - SHOWN_PACKAGES} more" if len(cuda) > SHOWN_PACKAGES else ""
    raise FleetError(
        f"torch {build.version} for {target.name} is a CUDA build: {build.file}{sizes} requires "
        f"{', '.join(cuda[:SHOWN_PACKAGES])}{more}{with_all}. Nothing was downloaded",
        hint=f"give a CPU build in one of two ways: {OVERRIDE_VARIABLE}=DIR_OR_WHEEL fleet bundle …, or let pip find "
        f"it (PIP_FIND_LINKS=DIR, or in the inventory torch: {{source: find-links, location: DIR}})",
    )


def _total_size_bytes(build: TorchBuild, pin: TorchPin, target: Target, pip: Pip) -> int | None:
    """Size of torch with all it requires, where the index tells it; only for a message, so failures stay unsaid."""
    if pin.source != "index":
        return None
    arguments = ["--use-feature=fast-deps", *target.pip_options, f"torch=={build.version}"]
    try:
        found = pip.resolve(arguments, "adding up what this build requires")
    except FleetError:
        return None
    sizes = [remote_size_bytes(str(each["download_info"]["url"])) for each in found]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def remote_size_bytes(url: str) -> int | None:
    """Content length of a URL (HEAD request, or the local file's size), None if it cannot be known."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path)).stat().st_size
    if parts.scheme not in ("http", "https"):
        return None
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - the scheme is checked above
        with urllib.request.urlopen(request, timeout=HEAD_TIMEOUT_SECONDS) as answer:  # noqa: S310
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError, urllib.error.URLError):
        return None


def fetch_torch(build: TorchBuild, target: Target, directory: Path, pip: Pip) -> Path:
    """Bring the wheel into `directory`: copied, or downloaded by pip and checked against the index's digest.

    Raises:
        FleetError: the disk is too small, pip fails, or the digest differs.
    """
    path = directory / build.file
    size = remote_size_bytes(build.url)
    directory.mkdir(parents=True, exist_ok=True)
    require_free_space(directory, 2 * (size or 0), f"torch {build.version}")
    parts = urllib.parse.urlsplit(build.url)
    if parts.scheme == "file":
        pip.report(f"  copying {build.file} ({size_text(size or 0)})")
        copy_atomically(Path(urllib.parse.unquote(parts.path)), path)
        return path
    pip.report(f"  downloading {build.file}" + (f" ({size_text(size)})" if size else ""))
    with tempfile.TemporaryDirectory(prefix=".torch-", dir=directory) as staging:
        options: Sequence[str] = ["--quiet", "--no-deps", "--dest", staging, *target.pip_options]
        pip.run(["download", *options, f"torch=={build.version}"], f"downloading torch {build.version}")
        downloaded = next(Path(staging).glob("torch-*.whl"))
        found = sha256_file(downloaded)
        if build.sha256 not in (None, found):
            raise FleetError(
                f"{build.url}: SHA-256 is {found}, the index says {build.sha256}", hint="run `fleet bundle` again"
            )
        copy_atomically(downloaded, path)
    return path


def override_from_environment() -> str | None:
    """The value of TORCH_SOURCE, None if unset."""
    return os.environ.get(OVERRIDE_VARIABLE)
