"""A site written as YAML and read again is the same site."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.inventory.guards import Guards
from fleet.inventory.model import Timing
from fleet.inventory.schema import in_words
from fleet.inventory.sitefile import SiteFile

Load = Callable[..., SiteFile]

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True)
PRINTABLE = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn", "Co"), exclude_characters=","), max_size=20)
LABELS = st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,9}", fullmatch=True), PRINTABLE, max_size=3)
ODD_TEXT = st.sampled_from(
    ["NO", "on", "0644", "1.10", "12:30:45", "2024-01-31", "~", "null", "true", "1e3", "<<", "=", "-", "!x", "&a", "*a"]
)
MACS = (
    st.binary(min_size=6, max_size=6)
    .map(lambda raw: bytes([raw[0] & 0xFE | 0x02]) + raw[1:])
    .map(lambda raw: raw.hex(":"))
)


@st.composite
def sites(draw: st.DrawFn) -> dict[str, Any]:
    """A valid site as JSON data."""
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    macs = draw(st.lists(MACS, min_size=len(names), max_size=len(names), unique=True))
    boxes: dict[str, dict[str, Any]] = {
        name: {
            "address": f"10.0.0.{number}",
            "profile": "pc",
            "port": draw(st.integers(1, 65535)),
            "labels": draw(LABELS | st.dictionaries(st.sampled_from(["a", "NO", "on"]), ODD_TEXT)),
            "mac": draw(st.none() | st.just(macs[number])),
            "roles": list(draw(st.sampled_from([["stage"], ["stage", "monitor"], ["monitor", "stage"]]))),
            "link_mbit_per_second": draw(st.floats(0.1, 1e6) | st.integers(1, 10**6)),
            "threads": draw(st.none() | st.integers(1, 4096)),
        }
        for number, name in enumerate(names)
    }
    boxes[draw(st.sampled_from(names))]["roles"].append("coordinator")
    ring = draw(st.permutations(names))
    layers = draw(st.sampled_from(["auto", {name: f"{at}-{at}" for at, name in enumerate(ring)}]))
    return {
        "site": draw(NAMES),
        "device_profiles": {"pc": {"architecture": "x86_64", "torch": {"version": "2.13.0"}}},
        "boxes": boxes,
        "models": {"m": {"source": {"path": draw(PRINTABLE.filter(bool) | ODD_TEXT)}, "licence": draw(ODD_TEXT)}},
        "pipelines": {"p": {"model": "m", "boxes": list(ring), "layers": layers}},
        "timing": {"drain_seconds": draw(st.floats(0.001, 1e6))},
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=sites())
def test_what_is_written_is_read(load: Load, data: dict[str, Any]) -> None:
    given_keys = {key: value for key, value in data["boxes"].items()}
    loaded = load(json.dumps(data, ensure_ascii=False))
    seen = loaded.site.model_dump(mode="json")
    for name, box in given_keys.items():
        assert {key: seen["boxes"][name][key] for key in box} == box
    assert seen["models"]["m"]["source"]["path"] == data["models"]["m"]["source"]["path"]
    assert seen["pipelines"]["p"]["layers"] == data["pipelines"]["p"]["layers"]
    assert load(json.dumps(without_nulls(seen), ensure_ascii=False)).site == loaded.site


def without_nulls(value: Any) -> Any:
    """JSON data without the keys that say nothing."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def test_units_are_in_the_names() -> None:
    """Every number of the timing and guards sections says its unit."""
    units = (
        "_seconds",
        "_hours",
        "_years",
        "_celsius",
        "_per_hour",
        "_per_day",
        "_milliseconds",
        "_percent",
        "_ppm",
        "_mb",
    )
    counts = ("local_stratum", "silent_rounds", "stopped_rounds", "down_rounds")
    guards = [info.annotation for name, info in Guards.model_fields.items() if name != "observe"]
    for section in (Timing, *guards):
        for name, info in section.model_fields.items():
            assert in_words(info.annotation) == "number"
            assert name.endswith(units) or name in counts
