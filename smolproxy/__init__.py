"""smolproxy: share llama.cpp servers among people, with keys, routing and exact books."""

__version__ = "0.1.0"
