"""Log lines as JSON objects on stderr, one a line; supervisord keeps and rotates them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

# Attributes that every record has; whatever else came in by `extra=` becomes a field of the line.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time (UTC), level, box, logger, message, the fields given by `extra`, and a traceback if there is one."""

    def __init__(self, box: str) -> None:
        super().__init__()
        self._box = box

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "box": self._box,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in record.__dict__.items() if key not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up_logging(box: str) -> None:
    """Send every log record of the process to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(box))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
