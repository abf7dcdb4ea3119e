"""Certificates of the listening ports, read again when they change, so that renewing one needs no restart."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from scorer.config import Config
from scorer.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files. client_ca: clients must show a certificate that it signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None

    @classmethod
    def of(cls, config: Config) -> Certificates | None:
        """None where no certificate is configured. Raises ConfigError for half a pair or files that do not fit."""
        if config.tls_certificate is None and config.tls_key is None and config.tls_client_ca is None:
            return None
        if config.tls_certificate is None or config.tls_key is None:
            raise ConfigError("tls_certificate and tls_key go together, and tls_client_ca needs both")
        ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
        made = cls(Path(config.tls_certificate), Path(config.tls_key), ca)
        try:
            made.context()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_certificate, tls_key, tls_client_ca: {error}") from None
        return made

    def context(self) -> ssl.SSLContext:
        """For an HTTP server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever one of the files does. Raises OSError."""
        files = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return tuple((told.st_mtime_ns, told.st_size, told.st_ino) for told in map(Path.stat, files))

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server: asked at every handshake, and answered anew once the files have changed."""
        fetch: Any = Renewal(self, self._configuration)  # the stubs do not know that None means: as before
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch, self.client_ca is not None)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca = None if self.client_ca is None else self.client_ca.read_bytes()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)


class Renewal(Generic[T]):
    """Makes something of the files whenever they have changed since it was made itself. Where they are damaged it says
    so once, and goes on trying."""

    def __init__(self, certificates: Certificates, make: Callable[[], T]) -> None:
        self._certificates = certificates
        self._make = make
        self._seen = certificates.state()
        self._told = ""

    def __call__(self) -> T | None:
        """None: as before."""
        try:
            state = self._certificates.state()
            if state == self._seen:
                return None
            self._certificates.context()  # half a renewal would close the port: key and certificate must fit
            made = self._make()
        except (OSError, ssl.SSLError) as error:
            if str(error) != self._told:
                log.error("certificates: %s; the ones in use stay", error)
            self._told = str(error)
            return None
        self._seen, self._told = state, ""
        log.info("certificates read again")
        return made
