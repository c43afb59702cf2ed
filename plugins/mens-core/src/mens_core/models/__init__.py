"""Language models, each written once over the operator contract.

`load` makes a `Model` of a checkpoint; `gemma3` and `qwen3` are the families, `layers` the
parts that both are made of.
"""
