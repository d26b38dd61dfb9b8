"""Random walks over the memory and state calls, judged against cold replays, and the search for faults with them."""

from . import decoding, moving, refusals, states  # noqa: F401 - each enters its steps
