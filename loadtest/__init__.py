"""Benchmarks and load: every figure that README names comes from here."""
