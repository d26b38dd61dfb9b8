"""What a check draws: one case, small enough to read and to type again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from conformance.harness.arms.counts import counts
from conformance.harness.contract.schema import Invariant
from conformance.harness.engine import ContextSettings
from conformance.harness.prompts.layouts import byte_vocabulary
from conformance.harness.prompts.transcript import Transcript

#: Cache types that hold every value by itself; the others share scales within blocks.
FLOAT_TYPES = frozenset({"f32", "f16", "bf16"})

_BYTES = byte_vocabulary()

C = TypeVar("C", bound="Case")


class Case(BaseModel):
    """Base of all cases. A subclass's fields are the names that its invariant's `search` gives ranges for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def n_tokens(self) -> int:
        """Tokens that the case names, in fields called `tokens` or `..._tokens`, and those of all prompts of a transcript."""
        named: int = sum(value for name, value in self if name == "tokens" or name.endswith("_tokens"))
        tasks = [value for _, value in self if isinstance(value, Transcript)]
        return named + sum(step.live_cells for task in tasks for step in counts("append_only", task, 1, _BYTES))

    @classmethod
    def strategy(cls: type[C], invariant: Invariant) -> st.SearchStrategy[C]:
        """Cases over the ranges in the spec; simplest is every field at the low end of its range."""
        return st.fixed_dictionaries({name: space.strategy() for name, space in invariant.search.items()}).map(cls._of)

    @classmethod
    def _of(cls: type[C], fields: Mapping[str, Any]) -> C:
        return cls(**fields)

    @classmethod
    def mismatch(cls, invariant: Invariant) -> str | None:
        """How the fields differ from what the spec searches, or None."""
        fields, searched = set(cls.model_fields), set(invariant.search)
        if fields == searched:
            return None
        return (
            f"{invariant.id}: the search names {', '.join(sorted(searched - fields)) or 'nothing'} that {cls.__name__} "
            f"lacks, and lacks {', '.join(sorted(fields - searched)) or 'nothing'} that it has"
        )


class Decode(Case):
    """A text decoded in a context of some layout.

    Attributes:
        text_seed: chooses the tokens.
        ubatch: `n_ubatch`.
        flash_attn: "off" or "on".

    """

    text_seed: int
    ubatch: int
    flash_attn: Literal["off", "on"]

    def settings(self, *, cache_type: str = "f16", **more: Any) -> ContextSettings:
        """The context settings that this case asks for.

        K is of `cache_type`, and so is V, unless that is quantized and flash attention is off, which no build offers:
        then V is f16.
        """
        quantized = cache_type not in FLOAT_TYPES
        return ContextSettings(
            n_ubatch=self.ubatch,
            flash_attn=self.flash_attn,
            type_k=cache_type,
            type_v="f16" if quantized and self.flash_attn == "off" else cache_type,
            **more,
        )
