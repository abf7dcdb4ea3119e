"""Text in, scores out, over gRPC. `scorer.client` is the public import."""
