"""What is committed and made from code is what the code makes."""

from google.protobuf import descriptor_pb2

from deploy.envoy import generate as envoy
from deploy.prometheus import generate as rules
from prefixrank.v1 import scorer_pb2 as pb


def test_the_operators_rules():
    assert rules.main(["--check"]) == 0


def test_envoy_with_tls():
    assert envoy.main(["--check"]) == 0


def test_the_descriptor_set_is_the_protos_and_complete():
    made = descriptor_pb2.FileDescriptorSet.FromString(envoy.DESCRIPTORS.read_bytes())
    names = [file.name for file in made.file]
    for file in made.file:
        assert set(file.dependency) <= set(names[: names.index(file.name)]), "dependencies come first"
    (ours,) = [file for file in made.file if file.package == "prefixrank.v1"]
    assert ours == descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert "google/rpc/error_details.proto" in names
