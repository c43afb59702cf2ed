"""vox-host: discovers verified backend plugins and serves language models through them."""

__version__ = "0.1.0"
