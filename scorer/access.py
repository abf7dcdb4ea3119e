"""Who may call: bearer tokens, rotated without a restart, and how often each caller may.

A tokens file has one `TOKEN [TENANT]` a line; blank lines and lines that begin with # are skipped. It is read again
when it changes, so a secret that is mounted anew is in force within a second; a file that cannot be read or holds
nothing leaves the tokens as they were.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scorer.errors import ConfigError, Forbidden, RateLimited, Unauthenticated
from scorer.rate import TokenBucket

log = logging.getLogger(__name__)

MIN_TOKEN_CHARACTERS = 16
MAX_TOKENS = 1000
CHECK_SECONDS = 1.0
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. tenant: the one that the token is bound to, None where it may name any."""

    name: str
    tenant: str | None = None

    def tenant_of(self, asked: str) -> str:
        """The tenant that a request counts for. Raises Forbidden where the token is another tenant's."""
        if self.tenant is None:
            return asked
        if asked and asked != self.tenant:
            raise Forbidden("the token is bound to another tenant than the request's `tenant`")
        return self.tenant


ANYONE = Caller("anyone")


def parse_tokens(text: str) -> dict[bytes, Caller]:
    """Digest of each token -> its caller. Raises ValueError that names the line and never shows a token."""
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"line {number}: TOKEN or TOKEN TENANT, got {len(words)} words")
        if len(words[0]) < MIN_TOKEN_CHARACTERS or not words[0].isascii():
            raise ValueError(f"line {number}: a token has at least {MIN_TOKEN_CHARACTERS} ASCII characters")
        digest = _digest(words[0])
        callers[digest] = Caller(f"token-{digest.hex()[:8]}", words[1] if len(words) == 2 else None)
    if not 1 <= len(callers) <= MAX_TOKENS:
        raise ValueError(f"between 1 and {MAX_TOKENS} tokens, got {len(callers)}")
    return callers


class TokenFile:
    """The tokens of a file, read again when it changes. Threads may share it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where the file cannot be read or is malformed."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        try:
            self._seen, self._callers = self._state(), parse_tokens(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"auth_tokens_file {path}: {error}") from None

    def caller(self, token: str) -> Caller | None:
        """Whose token it is. Takes as long for every wrong token, and looks at all of them for a right one."""
        digest, found = _digest(token), None
        for known, caller in self._current().items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found

    def _current(self) -> Mapping[bytes, Caller]:
        with self._lock:
            if self._clock() - self._looked >= CHECK_SECONDS:
                self._looked = self._clock()
                self._read_if_changed()
            return self._callers

    def _read_if_changed(self) -> None:
        try:
            state = self._state()
            if state == self._seen:
                return
            self._callers = parse_tokens(self._path.read_text(encoding="utf-8"))
            self._seen = state
            log.info("tokens read again", extra={"tokens": len(self._callers)})
        except (OSError, ValueError) as error:
            log.error("auth_tokens_file %s: %s; the tokens stay as they were", self._path, error)

    def _state(self) -> tuple[int, int, int]:
        told = self._path.stat()
        return told.st_mtime_ns, told.st_size, told.st_ino


class Access:
    """Lets a call in or not. Without a tokens file everyone may call; the rate is then one for all."""

    def __init__(
        self,
        tokens: TokenFile | None = None,
        max_requests_per_second: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._rate = max_requests_per_second
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def open(self) -> bool:
        """Whether no token is asked for."""
        return self._tokens is None

    def caller(self, authorization: str | bytes | None) -> Caller:
        """Who sends this Authorization header. Raises Unauthenticated."""
        if self._tokens is None:
            return ANYONE
        given = authorization if isinstance(authorization, str) else ""
        if given[: len(SCHEME)].lower() != SCHEME:
            raise Unauthenticated("needs the header Authorization: Bearer TOKEN")
        found = self._tokens.caller(given[len(SCHEME) :].strip())
        if found is None:
            raise Unauthenticated("the bearer token is not known")
        return found

    def count(self, caller: Caller) -> None:
        """Counts one scoring call against the caller's rate. Raises RateLimited."""
        if not self._rate:
            return
        # As many buckets as there were tokens: callers cannot make up names.
        bucket = self._buckets.setdefault(caller.name, TokenBucket(self._rate, max(1.0, self._rate), self._clock()))
        if not bucket.take(self._clock()):
            raise RateLimited(f"more than max_requests_per_second = {self._rate:g} of this caller")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
