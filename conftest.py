"""Makes the suite's pytest plugin known."""

pytest_plugins = ["conformance.harness.exam.plugin"]
