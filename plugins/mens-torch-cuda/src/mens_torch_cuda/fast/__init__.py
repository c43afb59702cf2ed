"""Fast mode: bfloat16 on torch's kernels. Numerics of its own: named, never in place of canonical."""
