"""Vectors and checks that any lane, ours or a third party's, runs against the numerics.

`quick` is what a worker runs before it serves: small calls of every operator, compared by
digest; `cases_training` is the same for the operators of training. `inputs` makes the operands,
`record` writes the expected digests from the reference.
"""
