"""Models on disk: reading what others published, the store, tokenizers.

The store holds one directory per model in the layout of Hugging Face (docs/models.md); nothing
here computes with weights.
"""
