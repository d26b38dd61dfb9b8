"""Writes the published schemas anew: ``python -m conformance.harness.report``."""

import json

from conformance.harness.report import comparison, results

if __name__ == "__main__":
    for path, schema in (
        (results.SCHEMA_FILE, results.results_schema()),
        (comparison.SCHEMA_FILE, comparison.comparison_schema()),
    ):
        path.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
