"""Which torch is taken: found, inspected and judged before anything large moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.bundle.context import BuildContext
from fleet.bundle.files import sha256_file
from fleet.bundle.target import Target
from fleet.bundle.torch_source import TorchPin, apply_override, find_torch, satisfies
from fleet.bundle.torch_wheel import obtain_torch
from fleet.errors import FleetError
from tests.bundle.conftest import PipOf
from tests.bundle.fake_wheels import write_wheel

X86 = Target("x86_64", "3.11")
ARM = Target("aarch64", "3.10")
X86_TAG = "cp311-cp311-manylinux_2_28_x86_64"
NVIDIA = 'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"'


@pytest.mark.parametrize(
    ("found", "wanted", "answer"),
    [
        ("2.13.0+cpu", "2.13.0", True),
        ("2.13.0", "2.13.0", True),
        ("2.13", "2.13.0", True),
        ("2.3.0a0+ebedce2.nv23.05", "2.3.0", True),
        ("2.13.1", "2.13.0", False),
        ("2.4.0a0+07cecf4168.nv24.05.14710581", "2.4.0a0+07cecf4168.nv24.05.14710581", True),
        ("2.4.0a0+aaaaaaaaaa.nv24.05", "2.4.0a0+07cecf4168.nv24.05.14710581", False),
        ("2.4.0", "2.4.0a0", False),
    ],
)
def test_versions_are_compared_by_release_unless_the_pin_is_exact(found: str, wanted: str, answer: bool) -> None:
    assert satisfies(found, wanted) is answer


@given(st.lists(st.integers(0, 99), min_size=2, max_size=4), st.sampled_from(["", "+cpu", "a0+abc.nv23.05", ".post1"]))
def test_every_build_of_a_release_satisfies_it(release: list[int], suffix: str) -> None:
    plain = ".".join(str(number) for number in release)
    assert satisfies(plain + suffix, plain)
    assert not satisfies(f"1{plain}{suffix}", plain)


def find(pin: TorchPin, target: Target, pip_of: PipOf, wheels: Path) -> str:
    return find_torch(pin, target, pip_of(wheels)).file


def test_find_links_takes_the_wheel_that_fits_the_target(tmp_path: Path, pip_of: PipOf) -> None:
    write_wheel(tmp_path, "torch", "2.13.0+cpu", tag=X86_TAG)
    write_wheel(tmp_path, "torch", "2.13.0+cpu", tag="cp312-cp312-manylinux_2_28_x86_64")
    write_wheel(tmp_path, "torch", "2.12.0+cpu", tag=X86_TAG)
    write_wheel(tmp_path, "torch", "2.13.0a0+1.nv24.05", tag="cp310-cp310-linux_aarch64")
    pin = TorchPin("2.13.0", "find-links", tmp_path, "device profile p")
    assert find(pin, X86, pip_of, tmp_path) == f"torch-2.13.0+cpu-{X86_TAG}.whl"
    assert find(pin, ARM, pip_of, tmp_path) == "torch-2.13.0a0+1.nv24.05-cp310-cp310-linux_aarch64.whl"
    with pytest.raises(FleetError, match=r"device profile p: .* has no torch 2\.13\.0 for linux_aarch64-cp311"):
        find(pin, Target("aarch64", "3.11"), pip_of, tmp_path)


def test_a_wheel_that_needs_a_newer_glibc_than_boxes_have_is_not_taken(tmp_path: Path, pip_of: PipOf) -> None:
    write_wheel(tmp_path, "torch", "2.13.0", tag="cp311-cp311-manylinux_2_39_x86_64")
    with pytest.raises(FleetError, match="manylinux_2_39"):
        find(TorchPin("2.13.0", "find-links", tmp_path, "p"), X86, pip_of, tmp_path)


@pytest.mark.parametrize("source", ["index", "find-links"])
def test_a_build_that_requires_nvidia_stops_with_its_size_and_both_ways_out(
    tmp_path: Path, pip_of: PipOf, source: str
) -> None:
    wheel = write_wheel(tmp_path, "torch", "2.13.0", ["filelock", NVIDIA, "triton"], tag=X86_TAG)
    pin = TorchPin("2.13.0", source, tmp_path if source == "find-links" else None, "p")  # type: ignore[arg-type]
    with pytest.raises(FleetError) as caught:
        find_torch(pin, X86, pip_of(tmp_path))
    assert "is a CUDA build" in caught.value.message
    assert "nvidia-cudnn-cu13" in caught.value.message
    assert f"({wheel.stat().st_size} B)" in caught.value.message
    assert "TORCH_SOURCE=" in caught.value.hint
    assert "PIP_FIND_LINKS=" in caught.value.hint
    assert "find-links" in caught.value.hint


def test_nvidia_requirements_of_another_platform_do_not_count(tmp_path: Path, pip_of: PipOf) -> None:
    requirement = 'nvidia-cudnn-cu13; platform_machine == "x86_64"'
    write_wheel(tmp_path, "torch", "2.13.0", [requirement], tag="cp310-cp310-manylinux_2_28_aarch64")
    pin = TorchPin("2.13.0", "find-links", tmp_path, "p")
    assert find(pin, ARM, pip_of, tmp_path).endswith("aarch64.whl")


def test_the_index_is_pips_own_with_its_configuration(tmp_path: Path, pip_of: PipOf) -> None:
    write_wheel(tmp_path, "torch", "2.13.0+cpu", ["filelock"], tag=X86_TAG)
    pin = TorchPin("2.13.0", "index", None, "p")
    build = find_torch(pin, X86, pip_of(tmp_path))
    assert (build.version, build.requires) == ("2.13.0+cpu", ("filelock",))
    with pytest.raises(FleetError, match=r"no usable wheel of torch==2\.13\.0"):
        find_torch(pin, ARM, pip_of(tmp_path))


def test_the_override_wins_over_the_profile(tmp_path: Path, pip_of: PipOf) -> None:
    wheel = write_wheel(tmp_path, "torch", "2.13.0+cpu", tag=X86_TAG)
    pin = TorchPin("2.13.0", "index", None, "device profile p")
    assert apply_override(pin, None) is pin
    for value, source in ((wheel, "path"), (tmp_path, "find-links")):
        overridden = apply_override(pin, str(value))
        assert (overridden.source, overridden.said_by) == (source, "TORCH_SOURCE")
        assert find(overridden, X86, pip_of, tmp_path / "empty") == wheel.name
    with pytest.raises(FleetError, match="TORCH_SOURCE=/nothing"):
        apply_override(pin, "/nothing")


def test_a_truncated_wheel_is_refused_by_name(tmp_path: Path, pip_of: PipOf) -> None:
    wheel = write_wheel(tmp_path, "torch", "2.13.0", tag=X86_TAG)
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(FleetError, match=wheel.name.replace("+", r"\+")):
        find(TorchPin("2.13.0", "path", wheel, "p"), X86, pip_of, tmp_path)


@pytest.mark.parametrize("source", ["index", "find-links"])
def test_torch_is_fetched_once_and_again_when_damaged(
    tmp_path: Path, context_of: Callable[[Path], BuildContext], source: str
) -> None:
    wheels = tmp_path / "wheels"
    original = write_wheel(wheels, "torch", "2.13.0+cpu", tag=X86_TAG)
    context = context_of(wheels)
    pin = TorchPin("2.13.0", source, wheels if source == "find-links" else None, "p")  # type: ignore[arg-type]
    path = obtain_torch(pin, X86, context)
    assert path == context.bundle / "wheels" / X86.name / original.name
    assert sha256_file(path) == sha256_file(original)
    inode = path.stat().st_ino
    assert obtain_torch(pin, X86, context).stat().st_ino == inode
    path.write_bytes(b"damaged")
    assert sha256_file(obtain_torch(pin, X86, context)) == sha256_file(original)
