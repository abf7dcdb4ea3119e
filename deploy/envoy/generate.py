"""What is made from code for Envoy: `python -m deploy.envoy.generate` writes it, with --check compares it.

scorer.pb        the service as a descriptor set, for HTTP/JSON, with the google.rpc types that errors carry
envoy-mtls.yaml  envoy.yaml with TLS to callers and to replicas, both ways
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2, status_pb2

from prefixrank.v1 import scorer_pb2 as pb

HERE = Path(__file__).parent
BASE, MTLS, DESCRIPTORS = HERE / "envoy.yaml", HERE / "envoy-mtls.yaml", HERE / "scorer.pb"
SECRETS = "/etc/envoy-tls"
TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3."
HEAD = "# Made from envoy.yaml by deploy/envoy/generate.py: TLS with certificates of one authority on both sides.\n"


def descriptors() -> bytes:
    """A FileDescriptorSet, dependencies first."""
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for file in (pb.DESCRIPTOR, error_details_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR):
        for each in _with_dependencies(file):
            found.setdefault(each.name, descriptor_pb2.FileDescriptorProto.FromString(each.serialized_pb))
    return descriptor_pb2.FileDescriptorSet(file=found.values()).SerializeToString(deterministic=True)


def _with_dependencies(file: FileDescriptor) -> Iterator[FileDescriptor]:
    for dependency in file.dependencies:
        yield from _with_dependencies(dependency)
    yield file


def mtls(config: Any) -> Any:
    """The configuration with a certificate asked for and shown on both sides. Changes and returns it."""
    listener, cluster = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"][0]
    context = _context()
    listener["filter_chains"][0]["transport_socket"] = _socket(
        "DownstreamTlsContext", require_client_certificate=True, common_tls_context=context
    )
    cluster["transport_socket"] = _socket("UpstreamTlsContext", sni="prefixrank", common_tls_context=_context())
    return config


def _context() -> dict[str, Any]:
    def file(name: str) -> dict[str, str]:
        return {"filename": f"{SECRETS}/{name}"}

    return {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificates": [{"certificate_chain": file("tls.crt"), "private_key": file("tls.key")}],
        "validation_context": {"trusted_ca": file("ca.crt")},
    }


def _socket(kind: str, **settings: Any) -> dict[str, Any]:
    return {"name": "envoy.transport_sockets.tls", "typed_config": {"@type": TLS + kind, **settings}}


def main(arguments: Sequence[str]) -> int:
    """Writes both files, or compares the second."""
    config = mtls(yaml.safe_load(BASE.read_text(encoding="utf-8")))
    made = {MTLS: (HEAD + yaml.safe_dump(config, sort_keys=False, width=120)).encode(), DESCRIPTORS: descriptors()}
    if "--check" not in arguments:
        for path, content in made.items():
            path.write_bytes(content)
        return 0
    # Other versions of protobuf may write a descriptor's bytes in another order: the test compares what they say.
    stale = [str(MTLS)] if MTLS.read_bytes() != made[MTLS] else []
    if stale:
        print(f"not what their code makes: {', '.join(stale)}: python -m deploy.envoy.generate", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
