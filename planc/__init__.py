"""planc compiles Hugging Face language models ahead of time into plans, and serves them."""

__version__ = "0.1.0"
