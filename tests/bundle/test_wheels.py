"""Wheels of a target: resolved by pip from a directory, closed with the target's markers, locked with digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fleet.bundle.context import BuildContext
from fleet.bundle.files import sha256_file
from fleet.bundle.manifest import CONTROL_LOCK, STAGE_LOCK
from fleet.bundle.target import Target
from fleet.bundle.wheel_metadata import WheelMetadata
from fleet.bundle.wheels import close, gather_wheels
from fleet.errors import FleetError
from tests.bundle.conftest import PipOf
from tests.bundle.fake_wheels import write_wheel

ContextOf = Callable[[Path], BuildContext]
X86 = Target("x86_64", "3.11")
OWN_REQUIRES = (
    'torch>=2.3; extra == "stage"',
    'serving>=2; extra == "stage"',
    'serving>=2; extra == "control"',
    'watching; extra == "guards"',
    'nvidia-ml-py; extra == "guards"',
)


def wheelhouse(directory: Path, serving_requires: Sequence[str] = ()) -> Path:
    """An index of small packages: what our extras need, uv, and things that no lock may get."""
    write_wheel(directory, "serving", "1.0")
    write_wheel(directory, "serving", "2.1", serving_requires)
    write_wheel(directory, "watching", "0.5", tag="cp36-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64")
    write_wheel(directory, "nvidia-ml-py", "13.0")
    write_wheel(directory, "backport", "1.2")
    write_wheel(directory, "symbols", "3.0")
    write_wheel(directory, "uv", "0.9.0", tag="py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64")
    write_wheel(directory, "uv", "0.9.0", tag="py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64")
    return directory


def own_wheel(directory: Path) -> Path:
    return write_wheel(directory, "fleet-hardening", "0.1.0", OWN_REQUIRES, extras=("stage", "control", "guards"))


def torch_wheel(context: BuildContext, version: str = "2.13.0+cpu", requires: Sequence[str] = ("symbols",)) -> Path:
    directory = context.bundle / "wheels" / X86.name
    return write_wheel(directory, "torch", version, requires, tag="cp311-cp311-manylinux_2_28_x86_64")


def test_locks_hold_what_each_environment_needs(tmp_path: Path, context_of: ContextOf) -> None:
    context = context_of(wheelhouse(tmp_path / "index"))
    own, torch = own_wheel(tmp_path / "own"), torch_wheel(context)
    wheels = gather_wheels(X86, own, torch, context)
    names = {lock: {wheel.name: wheel.version for wheel in held.requirements} for lock, held in wheels.locks.items()}
    common = {"serving": "2.1", "watching": "0.5", "nvidia-ml-py": "13.0"}
    assert names == {CONTROL_LOCK: common, STAGE_LOCK: {**common, "torch": "2.13.0+cpu", "symbols": "3.0"}}
    assert (context.bundle / wheels.uv).is_file()
    for lock in wheels.locks.values():
        data = [
            {"name": wheel.name, "version": wheel.version, "file": wheel.file, "sha256": wheel.sha256}
            for wheel in lock.requirements
        ]
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        assert lock.digest == hashlib.sha256(canonical).hexdigest()
        assert all(sha256_file(context.bundle / wheel.file) == wheel.sha256 for wheel in lock.requirements)


def test_a_second_run_asks_nobody(tmp_path: Path, context_of: ContextOf) -> None:
    index = wheelhouse(tmp_path / "index")
    context = context_of(index)
    own, torch = own_wheel(tmp_path / "own"), torch_wheel(context)
    first = gather_wheels(X86, own, torch, context)
    for path in index.iterdir():
        path.unlink()
    assert gather_wheels(X86, own, torch, context) == first
    damaged = next(wheel for wheel in first.locks[STAGE_LOCK].requirements if wheel.name == "watching")
    (context.bundle / damaged.file).write_bytes(b"damaged")
    with pytest.raises(FleetError, match="no usable wheel"):
        gather_wheels(X86, own, torch, context)


def test_a_package_without_a_wheel_for_the_target_fails_in_the_office(tmp_path: Path, context_of: ContextOf) -> None:
    context = context_of(wheelhouse(tmp_path / "index"))
    with pytest.raises(FleetError, match=r"linux_aarch64-cp310: no usable wheel of watching"):
        gather_wheels(Target("aarch64", "3.10"), own_wheel(tmp_path / "own"), None, context)


def test_markers_are_those_of_the_target_not_of_the_office(tmp_path: Path, context_of: ContextOf) -> None:
    """pip 3.11 in the office leaves the backport out; a box with Python 3.10 needs it."""
    requires = ['backport; python_version < "3.11"', 'symbols; platform_machine == "aarch64"']
    index = wheelhouse(tmp_path / "index", requires)
    write_wheel(index, "watching", "0.5", tag="cp36-abi3-manylinux2014_aarch64")
    context = context_of(index)
    own = own_wheel(tmp_path / "own")
    there = gather_wheels(Target("aarch64", "3.10"), own, None, context).locks[CONTROL_LOCK]
    here = gather_wheels(Target("x86_64", "3.12"), own, None, context).locks[CONTROL_LOCK]
    assert {wheel.name for wheel in there.requirements} == {
        "serving", "watching", "nvidia-ml-py", "backport", "symbols"
    }  # fmt: skip
    assert {wheel.name for wheel in here.requirements} == {"serving", "watching", "nvidia-ml-py"}


def test_nothing_brings_cuda_or_another_torch_in(tmp_path: Path, context_of: ContextOf) -> None:
    index = wheelhouse(tmp_path / "index", ["nvidia-cudnn-cu13"])
    write_wheel(index, "nvidia-cudnn-cu13", "9.0")
    context = context_of(index)
    own, torch = own_wheel(tmp_path / "own"), torch_wheel(context)
    with pytest.raises(FleetError, match="nvidia-cudnn-cu13 would come in"):
        gather_wheels(X86, own, torch, context)
    write_wheel(index, "serving", "2.1", ["torch"])
    write_wheel(index, "torch", "2.14.0", tag="cp311-cp311-manylinux_2_28_x86_64")
    with pytest.raises(FleetError, match="another torch would come in"):
        gather_wheels(X86, own, torch, context)


def test_a_torch_below_our_bound_is_refused_and_a_vendors_pre_release_is_not(
    tmp_path: Path, context_of: ContextOf
) -> None:
    context = context_of(wheelhouse(tmp_path / "index"))
    own = own_wheel(tmp_path / "own")
    vendors = gather_wheels(X86, own, torch_wheel(context, "2.3.0a0+ebedce2.nv24.02"), context)
    assert "torch" in {wheel.name for wheel in vendors.locks[STAGE_LOCK].requirements}
    with pytest.raises(FleetError, match=r"torch 2\.1\.0 does not satisfy torch>=2\.3"):
        gather_wheels(X86, own, torch_wheel(context, "2.1.0"), context)


def test_closing_follows_extras_and_names_what_is_missing() -> None:
    metadata = {
        "a": WheelMetadata("a", "1.0", ("b[fast]>=1", 'never; extra == "unused"')),
        "b": WheelMetadata("b", "1.5", ('c; extra == "fast"', "a")),
        "c": WheelMetadata("c", "1.0", ("d>2",)),
        "d": WheelMetadata("d", "2.0", ()),
    }
    closure = close([Requirement("a")], metadata, X86)
    assert closure.names == {"a", "b", "c"}
    assert closure.missing == ("d>2",)


def test_an_index_out_of_reach_is_not_called_a_missing_wheel(pip_of: PipOf, tmp_path: Path) -> None:
    pip = pip_of(tmp_path)
    closed_port = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1"}
    unreachable = replace(pip, environment={**pip.environment, **closed_port})
    with pytest.raises(FleetError, match="downloading serving: pip did not reach its index, so serving was not found"):
        unreachable.run(["download", "--no-deps", "--dest", str(tmp_path), "serving"], "downloading serving")
