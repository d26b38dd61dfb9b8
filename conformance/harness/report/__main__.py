"""Writes ``results.schema.json`` anew: ``python -m conformance.harness.report``."""

import json

from conformance.harness.report.results import SCHEMA_FILE, results_schema

if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(results_schema(), indent=2) + "\n", encoding="utf-8")
