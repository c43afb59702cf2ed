"""A training run on the host's side: data, order, checkpoints, metrics, the loop.

The arithmetic is the worker's (`TrainingClient`); what happens between two steps is here. Pure
parts (`presets`, `pace`, `plot`, `memory`) know no file; `drive` is the one that acts.
"""
