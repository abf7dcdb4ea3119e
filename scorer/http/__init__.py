"""The HTTP API for those who come from another reranker: their requests, their answers, their errors."""
