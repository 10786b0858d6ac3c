"""What a box needs of the bundle, as contents with digests: files are named here, and read when they are sent."""

from __future__ import annotations

import platform
import shlex
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fleet.bundle.files import sha256_file
from fleet.bundle.manifest import CONTROL_LOCK, STAGE_LOCK, Manifest, load_manifest
from fleet.errors import FleetError
from fleet.inventory.model import DeviceProfile, Role, Site
from fleet.inventory.sitefile import SiteFile
from fleet.provision.desired import Content, EnvironmentSpec, FileSpec, TreeSpec
from fleet.provision.render_layout import BoxLayout

WEIGHTS_SUFFIX = ".safetensors"


def profile_architecture(profile: DeviceProfile) -> str:
    """Architecture of a profile's boxes; `auto` is this machine's."""
    return platform.machine() if profile.architecture == "auto" else profile.architecture


def profile_python(profile: DeviceProfile) -> str:
    """Python of a profile's boxes, "3.11"; `auto` is the running one."""
    return ".".join(platform.python_version_tuple()[:2]) if profile.python == "auto" else profile.python


def target_of(profile: DeviceProfile) -> str:
    """Name of a profile's wheels in the bundle, e.g. linux_x86_64-cp311."""
    major, minor = profile_python(profile).split(".")[:2]
    return f"linux_{profile_architecture(profile)}-cp{major}{minor}"


def locks_of(site: Site, box: str) -> tuple[str, ...]:
    """Names of the locks that a box has an environment of; supervisord runs from the first."""
    roles = site.boxes[box].roles
    names = [STAGE_LOCK] if Role.STAGE in roles else []
    if not names or any(role is not Role.STAGE for role in roles):
        names.append(CONTROL_LOCK)
    return tuple(names)


@dataclass(frozen=True)
class BundleView:
    """A finished bundle, seen from a box of a site."""

    site_file: SiteFile
    manifest: Manifest
    _verified: set[Path] = field(default_factory=set, init=False, repr=False, compare=False)
    _verifying: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, site_file: SiteFile) -> BundleView:
        """The site's bundle, checked.

        Raises:
            FleetError: there is none, it is damaged, or as `check`; always with the command that makes it.
        """
        try:
            view = cls(site_file, load_manifest(site_file.bundle_directory))
        except FleetError as error:
            raise FleetError(error.message, hint=f"fleet bundle {site_file.file}") from error
        view.check()
        return view

    def check(self) -> None:
        """Refuse a bundle that was made for another inventory, or that lost files since.

        Raises:
            FleetError: another site's; a target's lock or a model is missing; a file is gone or has another size
                (digests: see `verify`).
        """
        site, manifest = self.site_file.site, self.manifest
        if manifest.site != site.site:
            raise FleetError(
                f"{manifest.directory}: is a bundle of site {manifest.site}, {self.site_file.file} is site {site.site}",
                hint=self._again,
            )
        for box, spec in site.boxes.items():
            for lock in locks_of(site, box):
                try:
                    manifest.lock(target_of(site.device_profiles[spec.profile]), lock)
                except FleetError as error:
                    raise FleetError(f"{box}: {error.message}", hint=self._again) from error
        served = {line.model for line in site.pipelines.values() if line.engine.kind != "external"}
        if missing := sorted(served - set(manifest.models)):
            raise FleetError(f"{manifest.directory}: lacks the model {', '.join(missing)}", hint=self._again)
        for name, entry in manifest.files.items():
            path = manifest.path(name)
            size = path.stat().st_size if path.is_file() else -1
            if size != entry.size_bytes:
                found = "is missing" if size < 0 else f"has {size} bytes, expected {entry.size_bytes}"
                raise FleetError(f"{path} {found}", hint=self._again)
        self.verify([self._content(manifest.fleet_wheel)])  # read here, before any box is asked

    def verify(self, contents: Iterable[Content]) -> None:
        """Compare files that are about to be sent with their digests; each is read once, however many boxes want it.

        Raises:
            FleetError: a file can't be read or is damaged; nothing of it was sent.
        """
        for content in contents:
            if content.file is None:
                continue
            with self._verifying:  # the other boxes wait: they want the same files
                if content.file in self._verified:
                    continue
                try:
                    found = sha256_file(content.file)
                except OSError as error:
                    raise FleetError(f"{content.file}: {error.strerror}", hint=self._again) from error
                if found != content.sha256:
                    raise FleetError(
                        f"{content.file} is damaged: SHA-256 {found[:16]}…, the manifest says {content.sha256[:16]}…",
                        hint=f"rm {shlex.quote(str(content.file))}; {self._again}",
                    )
                self._verified.add(content.file)

    @property
    def wheel_path(self) -> Path:
        """Our own wheel."""
        return self.manifest.path(self.manifest.fleet_wheel)

    def environment(self, box: str, lock_name: str, layout: BoxLayout) -> EnvironmentSpec:
        """The environment of a lock on a box."""
        profile = self.site_file.site.device_profiles[self.site_file.site.boxes[box].profile]
        target = target_of(profile)
        lock = self.manifest.lock(target, lock_name)
        lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in lock.requirements]
        wheels = {PurePosixPath(wheel.file).name: self._content(wheel.file) for wheel in lock.requirements}
        return EnvironmentSpec(
            path=layout.environment(lock.digest),
            python=profile_python(profile),
            uv=self._content(self.manifest.targets[target].uv),
            wheels=tuple(sorted(wheels.items())),
            requirements="".join(f"{line}\n" for line in lines),
        )

    def model_tree(self, model: str, layout: BoxLayout, *, weights: bool) -> TreeSpec:
        """A model's directory on a box.

        Args:
            model: name in the inventory.
            weights: whole, as a stage needs it (it may be given other layers later); otherwise only what prompts
                are rendered and tokenised with.
        """
        bundled = self.manifest.models[model]
        root = layout.model(bundled.digest)
        below = f"{bundled.directory.rstrip('/')}/"
        files = [
            FileSpec(f"{root}/{file.removeprefix(below)}", self._content(file))
            for file in sorted(self.manifest.files)
            if file.startswith(below) and (weights or not file.endswith(WEIGHTS_SUFFIX))
        ]
        return TreeSpec(root, tuple(files))

    @property
    def _again(self) -> str:
        return f"fleet bundle {self.site_file.file}"

    def _content(self, file: str) -> Content:
        entry = self.manifest.files[file]
        return Content(sha256=entry.sha256, size_bytes=entry.size_bytes, file=self.manifest.path(file))
