"""Wires the parts: `service` answers requests with one model, `compose` builds it from what is installed."""
