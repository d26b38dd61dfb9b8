"""Known failures that a walk can keep clear of, where the build and the model under test have them."""

from __future__ import annotations

from collections.abc import Iterable

from conformance.harness.contract.known import BuildName, Known, match
from conformance.harness.contract.needs import Subject

#: Known failures that a walk can keep clear of.
AVOIDABLE = (
    "SM-01/rollback-whole-last-batch",
    "SM-01/rollback-after-single-tokens",
    "SM-01/rollback-after-another-sequence-came",
    "SM-03/removal-wildcard",
    "SM-03/sequence-ids-out-of-range",
    "SM-03/division-by-zero",
    "SM-04/empty-blob-into-a-dirty-sequence",
    "SM-04/keeping-one-removes-the-others",
    "SM-04/emptied-while-a-rollback-is-pending",
    "SM-05/save-while-a-copy-is-pending",
    "SM-05/copy-of-a-rolled-back-sequence",
    "SM-05/source-changed-while-a-copy-is-pending",
    "SM-06/trimming-a-copy-moves-the-original",
    "SM-06/shifting-a-copy-moves-the-original",
    "SM-06/saving-the-context-after-trimming-a-copy",
    "SM-07/abort-leaves-a-wrong-position",
    "SM-07/sliding-window-removal-below-the-window",
    "SM-07/rollback-into-a-gap",
    "SM-09/partial-copy-between-streams",
    "SM-10/sliding-cells-of-a-copy",
    "RB-01/rejected-restore-leaves-half-a-state",
    "RB-01/truncated-context",
    "RB-01/load-into-no-sequence",
    "RB-01/on-device-restore-of-a-bad-blob",
    "RB-02/rollback-depth-of-a-micro-batch",
    "RP-01/save-while-a-shift-is-pending",
    "RP-01/long-decode-after-a-context-was-restored",
    "RP-01/quantized-cache-on-device",
    "SP-02/shift-where-it-is-not-allowed",
    "SP-03/shift-with-bf16-keys",
    "SP-03/shift-with-quantized-unrotated-keys",
)

#: Those among them that end the process.
DEADLY = frozenset(
    (
        "SM-03/sequence-ids-out-of-range",
        "SM-03/division-by-zero",
        "SM-06/saving-the-context-after-trimming-a-copy",
        "SM-09/partial-copy-between-streams",
        "RB-01/on-device-restore-of-a-bad-blob",
        "RB-02/rollback-depth-of-a-micro-batch",
        "SP-02/shift-where-it-is-not-allowed",
        "SP-03/shift-with-bf16-keys",
        "SP-03/shift-with-quantized-unrotated-keys",
    )
)


def avoidable(entries: Iterable[Known], subject: Subject, build: BuildName) -> frozenset[str]:
    """The known failures to keep clear of on a model under a build: those whose entry covers both."""
    listed = tuple(entries)
    return frozenset(id for id in AVOIDABLE if match(listed, id, subject, build))
