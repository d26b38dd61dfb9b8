"""A transcript: what an agent saw, did and was told, step by step; readable as YAML and JSON."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, model_serializer, model_validator

from conformance.harness.contract.entry import Entry, wrong

FIXED_TEXTS = ("preamble", "turn", "closing", "evicted", "slot_heading")
"""Fields of a transcript that hold a text which no one step brought."""

_MOST = 2**31 - 1  # what the build's own counts of tokens hold
_TEXT = "write a string, or {seed: 7, tokens: 30}"
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class _Part(Entry):
    """Base of the parts of a transcript; also made from the plain lists and mappings of a recorded case."""

    model_config = ConfigDict(strict=False)

    @model_serializer
    def _short(self) -> Any:
        """Everything that is not as it is when nothing is said."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}


class Text(_Part):
    """A text, real or drawn: a plain string in a file, or ``{seed: 7, tokens: 30}``.

    A string is read by the vocabulary of whoever uses it, markers of the chat template included. A drawn text has
    exactly `tokens` tokens, and what they are follows from `seed`.
    """

    string: str | None = None
    seed: Annotated[int | None, Field(ge=0, description="a whole number from 0 up")] = None
    tokens: Annotated[int | None, Field(ge=0, le=_MOST, description=f"a number of tokens, 0 to {_MOST}")] = None

    @classmethod
    def drawn(cls, seed: int, tokens: int) -> Text:
        """A text of so many tokens."""
        return cls(seed=seed, tokens=tokens)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        if not isinstance(given, (str, dict, Text)):
            raise wrong("neither a string nor a drawn text", _TEXT)
        return {"string": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_of_both(self) -> Text:
        drawn = (self.seed is not None, self.tokens is not None)
        if drawn != ((self.string is None),) * 2:
            raise wrong("neither a string nor a drawn text", _TEXT)
        return self

    @model_serializer
    def _short(self) -> Any:
        return {"seed": self.seed, "tokens": self.tokens} if self.string is None else self.string


class Screenshot(_Part):
    """An image of width x height merged patches: its content is made from `seed`, or is that of the file at `path`.

    One token for each patch. Positions advance by the longer side (M-RoPE), whatever the number of tokens.
    """

    width: Annotated[int, Field(ge=1, le=_MOST, description=f"a number of merged patches, 1 to {_MOST}")]
    height: Annotated[int, Field(ge=1, le=_MOST, description=f"a number of merged patches, 1 to {_MOST}")]
    seed: Annotated[int, Field(ge=0, description="a whole number from 0 up")] = 0
    path: str | None = None

    @property
    def n_tokens(self) -> int:
        """Embeddings that the image consists of, and cells that it takes."""
        return self.width * self.height

    @property
    def n_positions(self) -> int:
        """By how much the position of what follows is moved on."""
        return max(self.width, self.height)


class Step(_Part):
    """What the agent saw (a screenshot or nothing new), what it did, and what a tool answered."""

    screenshot: Screenshot | None = None
    action: Text
    tool: Text | None = None


def _some(text: Text) -> Text:
    if text.string == "" or text.tokens == 0:
        raise wrong("the preamble is empty", "write the system prompt there, or {seed: 0, tokens: 1} or more")
    return text


class Transcript(_Part):
    """A whole task, and the fixed texts that a layout puts around its parts (each empty unless it is given).

    Attributes:
        preamble: system prompt, tools and task: what every prompt begins with.
        steps: in order, the first is step 1.
        turn: stands in front of each action, behind what was seen, and stays there: the head of the model's turn.
        closing: stands at the very end of each prompt, behind `turn`; no later prompt repeats it.
        evicted: stands in the place of a screenshot that is no longer shown.
        slot_heading: stands in front of the screenshots of a terminal slot.

    """

    preamble: Annotated[Text, AfterValidator(_some)]
    steps: Annotated[tuple[Step, ...], Field(min_length=1, description="a list of steps, one at least")]
    turn: Text = Text(string="")
    closing: Text = Text(string="")
    evicted: Text = Text(string="[screenshot evicted]")
    slot_heading: Text = Text(string="")

    def first(self, steps: int) -> Transcript:
        """The same task, ended after so many steps."""
        return self.model_copy(update={"steps": self.steps[:steps]})

    def to_json(self) -> str:
        """The transcript on one line; readers of YAML take it for the same."""
        text = json.dumps(self.model_dump(), ensure_ascii=False)
        return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
