"""Millions of (query, document) rows of a parquet file, grouped by query, resumable."""
