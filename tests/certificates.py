"""Certificates for loopback, made by a certificate authority of the tests' own."""

from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True)
class Pki:
    """PEM files of a server, a client, and the authority that signed both."""

    directory: Path
    authority: trustme.CA

    @classmethod
    def made(cls, directory):
        pki = cls(directory, trustme.CA())
        pki.authority.cert_pem.write_to_path(pki.path("ca.crt"))
        pki.issue("server")
        pki.issue("client")
        return pki

    def path(self, name):
        return self.directory / name

    def issue(self, name):
        """A certificate of that name, in place of an older one."""
        made = self.authority.issue_cert("localhost", "127.0.0.1")
        made.private_key_pem.write_to_path(self.path(f"{name}.key"))
        self.path(f"{name}.crt").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return made

    def settings(self, mutual=True):
        told = {"tls_certificate": str(self.path("server.crt")), "tls_key": str(self.path("server.key"))}
        return told | ({"tls_client_ca": str(self.path("ca.crt"))} if mutual else {})

    def credentials(self, certificate=True):
        """For a gRPC client, with or without a certificate of its own."""
        own = [self.path(name).read_bytes() for name in ("client.key", "client.crt")] if certificate else (None, None)
        return grpc.ssl_channel_credentials(self.path("ca.crt").read_bytes(), *own)
