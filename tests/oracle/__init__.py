"""Judges from outside: code that shares nothing with the models it judges."""
