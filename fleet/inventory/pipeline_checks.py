"""Rules between a pipeline and the rest of the site: its boxes, layer ranges and engine. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from fleet.inventory.model import Pipeline, Role, Site
from fleet.inventory.problems import nearest, shown
from fleet.inventory.sitefile import KeyPath

Finding = tuple[KeyPath, str]  # where, and what is wrong
LineOf = Callable[[KeyPath], int]  # key path → 1-based line

LAYER_RANGE = re.compile(r"(0|[1-9][0-9]{0,3})-(0|[1-9][0-9]{0,3})")


def check_pipelines(site: Site, line_of: LineOf) -> Iterator[Finding]:
    """Every rule about every pipeline."""
    user: dict[str, str] = {}
    for name, pipeline in site.pipelines.items():
        path: KeyPath = ("pipelines", name)
        if pipeline.model not in site.models:
            yield (*path, "model"), f"no model {shown(pipeline.model)}; {nearest(pipeline.model, site.models)}"
        for index, box in enumerate(pipeline.boxes):
            entry: KeyPath = (*path, "boxes", index)
            if box not in site.boxes:
                yield entry, f"no box {shown(box)}; {nearest(box, site.boxes)}"
            elif Role.STAGE not in site.boxes[box].roles:
                yield entry, f"{box} has no role stage: add it to boxes.{box}.roles, or take {box} out of the pipeline"
            if box in pipeline.boxes[:index]:
                first = line_of((*path, "boxes", pipeline.boxes.index(box)))
                yield entry, f"{box} stands here and on line {first}: a box holds one stage of a pipeline; delete one"
            elif user.setdefault(box, name) != name:
                line = line_of(("pipelines", user[box], "boxes"))
                yield (
                    entry,
                    f"{box} already serves pipeline {user[box]} (line {line}): a box runs one stage; delete one",
                )
        yield from _layers(pipeline, (*path, "layers"))
        yield from _engine(pipeline, (*path, "engine"))


def _layers(pipeline: Pipeline, path: KeyPath) -> Iterator[Finding]:
    """Explicit ranges are contiguous from layer 0 in ring order; `fleet plan` compares the end with the model."""
    if pipeline.layers == "auto":
        return
    for name in pipeline.layers:
        if name not in pipeline.boxes:
            yield (*path, name), f"{name} is not a box of this pipeline; {nearest(name, pipeline.boxes)}"
    start = 0
    for name in pipeline.boxes:
        text = pipeline.layers.get(name)
        if text is None:
            yield path, f"{name} has no range: write {name}: {start}-…, or layers: auto for all"
            return
        match = LAYER_RANGE.fullmatch(text)
        if match is None or int(match[1]) > int(match[2]):
            yield (*path, name), f'read {shown(text)}: expected "first-last", both inclusive, e.g. {start}-{start + 9}'
            return
        first, last = int(match[1]), int(match[2])
        if first != start:
            what = "the first box starts at layer 0" if start == 0 else f"the box before ends at layer {start - 1}"
            yield (*path, name), f"read {text}: {what}: write {start}-{max(last, start)}"
        start = last + 1


def _engine(pipeline: Pipeline, path: KeyPath) -> Iterator[Finding]:
    engine = pipeline.engine
    if engine.kind == "stage-runtime":
        for key in ("command", "health_url"):
            if getattr(engine, key) is not None:
                yield (*path, key), f"{key} is for external engines: delete it, or write kind: external"
        return
    for key, example in (("command", "llama-server --port 8081"), ("health_url", "http://127.0.0.1:8081/health")):
        if getattr(engine, key) is None:
            yield path, f"an external engine needs {key}: write {key}: {example}"
    if len(pipeline.boxes) != 1:
        boxes = (*path[:-1], "boxes")
        yield boxes, f"an external engine runs on one box, read {len(pipeline.boxes)}: write one pipeline a box"
    if engine.health_url is not None and not _is_http_url(engine.health_url):
        yield (
            (*path, "health_url"),
            f"read {shown(engine.health_url)}: expected a URL, e.g. http://127.0.0.1:8081/health",
        )


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in text and parts.port != 0
    except ValueError:
        return False
