"""Run directories: what a training leaves, and adapters that can be served.

layout            the names of a run's files
manifest          adapter_manifest.json, typed and strict
base_tensors      which tensor of the base model each adapted layer belongs to
adapter_config    PEFT's adapter_config.json, as we write it
publish           three files that change as one
source            what is known of an adapter, wherever it came from
open              from a path to an `AdapterSource`
"""
