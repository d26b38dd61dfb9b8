"""What a person runs, each as `python -m tools.NAME`; `install` is tox's."""
