"""The last serving route of each pipeline on disk: a gateway that starts without a coordinator knows where to go."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stage_runtime.link.control import decode_control
from stage_runtime.link.frames import FrameError
from stage_runtime.link.membership import Route

log = logging.getLogger(__name__)

ROUTES_FILE = "routes.json"
ROUTES_SCHEMA = 1
MAX_ROUTES_BYTES = 4 * 2**20


def decode_route(body: bytes) -> Route:
    """A route that can be followed.

    Raises:
        FrameError: no route, or one that serves without saying where.
    """
    route = decode_control(Route, body)
    if route.state == "serving" and not (route.first_stage and route.host and 0 < route.port < 2**16):
        where = f"{route.first_stage[:80]!r} at {route.host[:80]!r}, port {route.port}"
        raise FrameError(f"Route body: pipeline {route.pipeline[:80]!r} serves under no address: {where}")
    return route


class RouteStore:
    """`routes.json` in a directory; written whole, fsynced and renamed, so a power cut leaves the old or the new one.

    Args:
        directory: made if it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ROUTES_FILE
        self._routes: dict[str, Route] = {}
        self._saving = threading.Lock()  # a session that ends leaves its last write running beside the next one's

    def load(self) -> dict[str, Route]:
        """Pipeline → its last serving route. Blocks. What can't be read is as good as none: the coordinator knows."""
        try:
            with self._path.open("rb") as file:
                data = json.loads(file.read(MAX_ROUTES_BYTES))
            if not isinstance(data, dict) or data.get("schema") != ROUTES_SCHEMA:
                raise ValueError(f"expected an object with schema {ROUTES_SCHEMA}")
            routes = [decode_route(json.dumps(route).encode()) for route in data["routes"]]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError, FrameError) as error:
            log.warning("%s: not used: %s", self._path, error)
            return {}
        self._routes = {route.pipeline: route for route in routes}
        return dict(self._routes)

    def save(self, route: Route) -> None:
        """Keep a serving route. Blocks. A disk that takes nothing costs a warning: this run has the route anyway."""
        with self._saving:
            self._save(route)

    def _save(self, route: Route) -> None:
        self._routes[route.pipeline] = route
        document: dict[str, Any] = {"schema": ROUTES_SCHEMA, "routes": [asdict(each) for each in self._routes.values()]}
        temporary = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            log.warning("%s: the route of pipeline %s is not kept: %s", self._path, route.pipeline, error)
