"""Models on disk: import, catalogue, tokenizers."""
