"""Log lines as JSON objects on stderr, which supervisord keeps; no prompt, answer or key is ever in them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

logger = logging.getLogger("fleet.gateway")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and what was passed as `extra={"fields": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging() -> None:
    """Send the process' log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_request(fields: dict[str, Any]) -> None:
    """One line for an answered request."""
    logger.info("request", extra={"fields": fields})
