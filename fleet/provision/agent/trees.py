"""Content-addressed directories: built beside their place, synced once, renamed. What arrived before an interruption
is kept."""

from __future__ import annotations

import os
from typing import Any

from fleet.provision.agent.paths import (
    Ownership,
    make_parents,
    path_fact,
    remove,
    sha256_of,
    sync_directory,
    sync_file_system,
    write_aside,
)
from fleet.provision.agent.peer import Peer

PARTIAL_SUFFIX = ".partial"
DIRECTORY_MODE = 0o755
Spec = dict[str, Any]


def _content(spec: Spec) -> Spec:
    return {"sha256": spec["sha256"], "size_bytes": spec["size_bytes"]}


def _arrived(path: str, spec: Spec) -> bool:
    """A file of an earlier, interrupted run that is whole."""
    return (
        os.path.isfile(path)
        and not os.path.islink(path)
        and os.path.getsize(path) == spec["size_bytes"]
        and sha256_of(path) == spec["sha256"]
    )


def build(tree: Spec, peer: Peer, ownership: Ownership) -> None:
    """Make a tree that is missing: into `<path>.partial`, whole files of an earlier run kept, then renamed."""
    path, partial = tree["path"], tree["path"] + PARTIAL_SUFFIX
    make_parents(path)
    os.makedirs(partial, mode=0o755, exist_ok=True)
    places = {partial + spec["path"][len(path) :]: spec for spec in tree["files"]}
    _drop_strangers(partial, places)
    missing = {place: spec for place, spec in places.items() if not _arrived(place, spec)}
    size = sum(spec["size_bytes"] for spec in missing.values())
    peer.waits_for(f"{len(missing)} files, {size / 1e6:.1f} MB")
    for (place, spec), blob in zip(
        missing.items(), peer.contents([_content(spec) for spec in missing.values()]), strict=True
    ):
        os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
        write_aside(place, blob.chunks(), ownership, spec, sync=False)
    for place in places.keys() - missing.keys():
        spec = places[place]
        ownership.set(place, spec["mode"], spec["owner"], spec["group"])
    peer.waits_for("the disk to hold it safely")
    _set_directories(partial)
    sync_file_system(partial)
    remove(path)
    os.rename(partial, path)
    sync_directory(os.path.dirname(path))


def _set_directories(partial: str) -> None:
    """0755 whatever the umask says."""
    for directory, _, _ in os.walk(partial):
        os.chmod(directory, DIRECTORY_MODE)


def _drop_strangers(partial: str, places: dict[str, Spec]) -> None:
    """Remove what an older version of the tree, or an interrupted write, left behind."""
    for directory, directories, files in os.walk(partial):
        links = [name for name in directories if os.path.islink(os.path.join(directory, name))]
        for name in [*files, *links]:
            place = os.path.join(directory, name)
            if place not in places:
                os.unlink(place)


def mend(files: list[tuple[Spec, str]], peer: Peer, ownership: Ownership) -> None:
    """Put single files right and leave all others alone.

    Args:
        files: (specification, why); a "why" of only mode or owner sends no content.
    """
    wanted = []
    for spec, why in files:
        if not {"missing", "kind", "content"} & set(why.split(", ")):
            ownership.set(spec["path"], spec["mode"], spec["owner"], spec["group"])
        else:
            wanted.append(spec)
    for spec, blob in zip(wanted, peer.contents([_content(spec) for spec in wanted]), strict=True):
        make_parents(spec["path"])
        write_aside(spec["path"], blob.chunks(), ownership, spec, sync=True)


def remove_strangers(paths: list[str]) -> None:
    """Remove files of trees that nobody manages."""
    for path in paths:
        if path_fact(path)["kind"] != "missing":
            remove(path)
            sync_directory(os.path.dirname(path))
