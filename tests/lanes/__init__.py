"""Lanes and batches for tests: small, plain and independent of any shipped lane."""
