"""Probes the machine into a plain record (`record`), in a child process with a time limit."""
