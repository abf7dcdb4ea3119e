"""The log on standard error: one JSON object a line, or text for a person at a terminal.

Every value is a field of its own and is escaped by the renderer, so nothing that a caller sends can forge a line. No
text of a query or document is ever given to the log.
"""

from __future__ import annotations

import logging
import sys
from typing import IO, Literal

import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "json", "text"]


def configure(log_format: LogFormat = "auto", stream: IO[str] | None = None) -> None:
    """Sends all of the process's log records to `stream`, standard error unless given."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(log_format == "text" or (log_format == "auto" and stream.isatty())))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def formatter(text: bool) -> logging.Formatter:
    """Renders a record with its extra fields, as text or as JSON."""
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if text:
        rendering: list[Processor] = [_one_line, structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    processors = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors)


def _one_line(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Text has no quotes around its values: what is not printable is escaped."""
    return {key: _printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
