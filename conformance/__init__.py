"""A conformance suite for llama.cpp's memory: one test module per topic in `specs/`."""
