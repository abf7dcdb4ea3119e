"""Messages (`scorer_pb2`) and stubs (`scorer_pb2_grpc`) of the PrefixRank API, version 1."""
