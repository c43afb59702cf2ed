"""Run directories: what a training leaves, and adapters that can be served.

layout            the names of a run's files
manifest          adapter_manifest.json, typed and strict
base_tensors      which tensor of the base model each adapted layer belongs to
adapter_config    PEFT's adapter_config.json, as we write it
publish           three files that change as one
source            what is known of an adapter, wherever it came from
peft_config       PEFT's adapter_config.json, as others write it
peft_folder       an adapter that PEFT wrote
older_layout      an adapter of the layout before this one
foreign_tensors   which parameter each tensor of theirs is
open              from a path to an `AdapterSource`
"""
