"""The wire format: generated from `protos/prefixrank/v1/scorer.proto`."""
