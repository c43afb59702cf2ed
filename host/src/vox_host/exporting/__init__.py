"""Take an adapter out of vox-host: merged into its base, or on its own, for others to read.

merging         a worker folds the adapter into the weights
merged_folder   those weights as a model folder
peft_export     PEFT's two files
terms           the base model's licence, beside whatever is written
gguf_write      the container of GGUF
gguf_adapter    the adapter as llama.cpp loads it beside a base
gguf_model      the merged model as one GGUF file
"""
