"""Low-rank adapters of a model's layers.

plan          which layers are adapted, in which order, and by what they are scaled
keys          the names of an adapter's tensors (PEFT's), and its digest
initial       first values, from the seed
apply         tensors on a lane to the updates that a model runs with
file          safetensors bytes, there and back
copies        base weights that a file holds beside its updates, held against the base
served        an adapter's file held against a model that is to be served with it
merging       an adapter folded into the weights of its base
merged_file   the folder that it is written into
merge_request the protocol's question for it
"""
