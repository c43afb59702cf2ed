"""One training on several devices: a process for each, of which the worker is the first.

Rank 0 asks and decides; the others compute the gradients of their examples. What crosses between
them is bytes: nothing is summed on the way (decision 0032).
"""
