"""Reads ``specs/`` and reports every mistake in it by file, line and key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from conformance.harness.contract.entry import Entry
from conformance.harness.contract.schema import (
    Ceiling,
    Document,
    Documents,
    Family,
    Invariant,
    NoiseCeilings,
    Profile,
    Profiles,
    Topic,
    Weights,
)

Shape = TypeVar("Shape", bound=Entry)
Loc = tuple[int | str, ...]
_HALF_A_PAIR = re.compile(r"[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
_NO_TOPICS = ("documents.yaml", "profiles.yaml", "noise.yaml", "performance.yaml")


class SpecError(Exception):
    """Spec files that cannot be used; ``problems`` holds a line for each mistake.

    A line reads ``file:line: key path: what is wrong; what to do``.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Origin:
    """Where an invariant stands (``file:line``), under which topic, and which text claims it (title; section)."""

    where: str
    topic: str
    source: str


@dataclass(frozen=True)
class Contract:
    """Everything in ``specs/``: what a run judges by id, in the order of the files, the profiles of a run, the most noise.

    A case family is an entry of its own, under an id such as ``SM-01/some-case-family``.
    """

    invariants: Mapping[str, Invariant]
    origins: Mapping[str, Origin]
    profiles: Mapping[str, Profile]
    default_profile: str
    ceilings: Mapping[Weights, Ceiling]

    def __getitem__(self, id: str) -> Invariant:
        """The invariant, or the case family of one, that has this id."""
        try:
            return self.invariants[id]
        except KeyError:
            raise SpecError([f"no invariant {id!r}; {_advice(id, self.invariants)}"]) from None

    def __iter__(self) -> Iterator[Invariant]:
        return iter(self.invariants.values())

    def profile(self, name: str) -> Profile:
        """The profile called ``name``; raises SpecError when there is none."""
        try:
            return self.profiles[name]
        except KeyError:
            raise SpecError([f"no profile {name!r}; {_advice(name, self.profiles)}"]) from None


@dataclass(frozen=True)
class SpecFile(Generic[Shape]):
    """The content of a file together with the lines it stands on."""

    path: Path
    content: Shape
    root: yaml.Node

    def where(self, *loc: int | str) -> str:
        """``file:line`` of a key path."""
        return f"{self.path}:{_line(self.root, loc)}"

    def problem(self, loc: Loc, what: str, todo: str) -> str:
        """An error line on a key path."""
        return f"{self.where(*loc)}: {_key_path(loc)}: {what}; {todo}"

    def unknown(self, loc: Loc, noun: str, name: str, known: Iterable[str]) -> str:
        """An error line on a name that nothing carries."""
        return self.problem(loc, f"no {noun} {name!r}", _advice(name, known))


def load_specs(folder: Path, models: Collection[str] = ()) -> Contract:
    """The contract in ``folder``: ``documents.yaml``, ``profiles.yaml``, ``noise.yaml`` and a file for each topic.

    ``performance.yaml``, which the gate alone reads, is no topic. ``models`` are the names that invariants may list; when
    empty they are not checked. Raises SpecError with every problem found.
    """
    problems: list[str] = []

    def read(path: Path, shape: type[Shape]) -> SpecFile[Shape] | None:
        try:
            return load_file(path, shape)
        except SpecError as error:
            problems.extend(error.problems)
            return None

    documents = read(folder / "documents.yaml", Documents)
    profiles = read(folder / "profiles.yaml", Profiles)
    noise = read(folder / "noise.yaml", NoiseCeilings)
    paths = [path for path in sorted(folder.glob("*.yaml")) if path.name not in _NO_TOPICS]
    topics = [topic for path in paths if (topic := read(path, Topic))]
    if not paths:
        problems.append(f"{folder}: no invariants here; name a folder that has a file for each topic")
    if documents is None or profiles is None or noise is None:
        raise SpecError(problems)
    invariants: dict[str, Invariant] = {}
    origins: dict[str, Origin] = {}
    places: dict[str, str] = {}
    for topic in topics:
        problems += _loose_ends(topic, documents.content.documents, profiles.content.profiles, models)
        for index, invariant in enumerate(topic.content.invariants):
            loc = ("invariants", index, "id")
            if invariant.id in places:
                first = places[invariant.id]
                problems.append(topic.problem(loc, f"{invariant.id} is taken by {first}", "give it another id"))
                continue
            places[invariant.id] = topic.where(*loc)
            document = documents.content.documents.get(invariant.source.document or topic.content.document)
            source = f"{document.title if document else ''}; {invariant.source.section}"
            for check in invariant.checks():
                invariants[check.id] = check
                origins[check.id] = Origin(places[invariant.id], topic.content.topic, source)
    if problems:
        raise SpecError(problems)
    return Contract(invariants, origins, profiles.content.profiles, profiles.content.default, noise.content.ceilings)


def _loose_ends(
    topic: SpecFile[Topic],
    documents: Mapping[str, Document],
    profiles: Mapping[str, Profile],
    models: Collection[str],
) -> Iterator[str]:
    """Names in the file that nothing carries, and profiles without a count."""
    if topic.content.document not in documents:
        yield topic.unknown(("document",), "document", topic.content.document, documents)
    for index, invariant in enumerate(topic.content.invariants):
        at: Loc = ("invariants", index)
        document = invariant.source.document
        if document is not None and document not in documents:
            yield topic.unknown((*at, "source", "document"), "document", document, documents)
        yield from _loose_names(topic, at, invariant, profiles, models)
        for number, family in enumerate(invariant.families):
            yield from _loose_names(topic, (*at, "families", number), family, profiles, models)


def _loose_names(
    topic: SpecFile[Topic], at: Loc, entry: Invariant | Family, profiles: Mapping[str, Profile], models: Collection[str]
) -> Iterator[str]:
    """Models and profiles that nothing carries, and profiles without a count, in an invariant or a family."""
    for number, model in enumerate(entry.models or ()):
        if models and model not in models and model != "all":
            yield topic.unknown((*at, "models", number), "fixture model", model, models)
    if entry.examples is None:
        return
    for profile in entry.examples:
        if profile not in profiles:
            yield topic.unknown((*at, "examples", profile), "profile", profile, profiles)
    for profile in profiles:
        if profile not in entry.examples:
            yield topic.problem((*at, "examples"), f"no count for the profile {profile}", "add it")


def load_file(path: Path, shape: type[Shape]) -> SpecFile[Shape]:
    """Reads a YAML file of the given shape. Raises SpecError with every problem found in it."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise SpecError([f"{path}: cannot be read ({error.strerror}); check the path and its permissions"]) from None
    except UnicodeDecodeError as error:
        raise SpecError([f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8"]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError([f"{path}:{line}: not YAML, {error.problem}; correct this line or the one before"]) from None
    except yaml.YAMLError as error:
        raise SpecError([f"{path}: not YAML, {' '.join(str(error).split())}; remove what is named"]) from None
    if root is None:
        raise SpecError([f"{path}:1: empty; write {', '.join(shape.model_fields)}"])
    plain = _Plain(path)
    content = plain.of(root, ())
    try:
        entry = shape.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        plain.problems += _sentences(path, root, shape, error)
    if plain.problems:
        raise SpecError(plain.problems)
    return SpecFile(path, entry, root)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core types, so that ``on``, ``no``, dates and 1:30 stay text and 1e-5 is a number; no aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not read", alias.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads as the same."""


_Loader.yaml_implicit_resolvers = _Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first)


def dump_yaml(content: Any) -> str:
    """Plain mappings, lists and scalars as YAML that `load_file` reads as the same."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False)
    return text


class _Plain:
    """Turns YAML nodes into dicts, lists and scalars; collects the mistakes that this loses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._scalars = yaml.constructor.SafeConstructor()

    def of(self, node: yaml.Node, loc: Loc) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            content: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value
                if not isinstance(key_node, yaml.ScalarNode):
                    self._report(key_node, loc, "a key that is a list or a mapping", "write a word")
                elif key in content:
                    first = _line(node, (key,))
                    self._report(key_node, (*loc, key), f"stands in line {first} already", "keep one of the two")
                else:
                    content[key] = self.of(value_node, (*loc, key))
            return content
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError):
            self._report(node, loc, f"cannot read {node.value!r} as {node.tag}", "drop the tag")
            return node.value
        if isinstance(value, str) and _HALF_A_PAIR.search(value):
            self._report(node, loc, "holds half of a pair of surrogates, which is no character", "write the whole one")
            return _HALF_A_PAIR.sub("\ufffd", value)
        return value

    def _report(self, node: yaml.Node, loc: Loc, what: str, todo: str) -> None:
        self.problems.append(f"{self.path}:{node.start_mark.line + 1}: {_key_path(loc)}: {what}; {todo}")


def _line(root: yaml.Node, loc: Iterable[int | str]) -> int:
    """The line a key path stands on; of what it is missing from, when it does not exist."""
    node, mark = root, root.start_mark
    for step in loc:
        found = _child(node, step)
        if found is None:
            break
        node, mark = found
    return mark.line + 1


def _child(node: yaml.Node, step: int | str) -> tuple[yaml.Node, yaml.Mark] | None:
    """The value at a key or index, and the mark of its key or of itself."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return value, key.start_mark
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step].start_mark
    return None


def _key_path(loc: Loc) -> str:
    """A key path as people write it: ``invariants[2].accept.rule``."""
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return steps.lstrip(".") or "top level"


def _advice(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


_NOUNS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
}


def _sentences(path: Path, root: yaml.Node, shape: type[Entry], errors: ValidationError) -> list[str]:
    """One error line for each place that does not validate, in the order of the file."""
    lines: dict[Loc, tuple[int, str]] = {}
    for error in errors.errors(include_url=False):
        if error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]:
            continue  # it counts the items that are right; what is wrong with the others has lines of its own
        loc = _existing(root, error["loc"], missing=error["type"] == "missing")
        what, todo = _sentence(shape, loc, error)
        number = _line(root, loc)
        lines[loc] = number, f"{path}:{number}: {_key_path(loc)}: {what}; {todo}"
    return [line for _, line in sorted(lines.values())]


def _existing(root: yaml.Node, loc: Loc, *, missing: bool) -> Loc:
    """The key path without the steps that only pydantic knows, such as the member of a union that was tried."""
    node, steps = root, []
    for number, step in enumerate(loc):
        found = _child(node, step)
        if found is not None:
            steps.append(step)
            node = found[0]
        elif missing and number == len(loc) - 1:
            steps.append(step)
    return tuple(steps)


def _sentence(shape: type[Entry], loc: Loc, error: ErrorDetails) -> tuple[str, str]:
    """What is wrong with the place, and what to do."""
    kind, found = error["type"], _shown(error["input"])
    siblings, field = _field(shape, loc)
    description = _description(field) if field else None
    if kind == "extra_forbidden":
        return "unknown key", _advice(str(loc[-1]), siblings)
    if kind == "missing":
        return "is missing", f"write {description}" if description else "add it"
    if kind == "literal_error":
        return f"found {found}", _advice(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    if kind == "spec":
        return error["msg"], error["ctx"]["todo"] or f"write {description}"
    if kind in ("dict_type", "model_type"):
        description = "a mapping"
    todo = description or _NOUNS.get(kind) or f"another value ({error['msg']})"
    return f"found {found}", f"write {todo}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}...")
    return json.dumps(value)


def _field(shape: type[BaseModel], loc: Loc) -> tuple[list[str], FieldInfo | None]:
    """The keys that may stand beside the last step of a key path, and the field the path leads into."""
    model: type[BaseModel] | None = shape
    siblings: list[str] = []
    field: FieldInfo | None = None
    inside = False
    for step in loc:
        if inside:
            inside = False
            continue
        siblings = list(model.model_fields) if model else []
        field = model.model_fields.get(str(step)) if model else None
        model = _model(field.annotation) if field else None
        inside = field is not None and _is_container(field.annotation)
    return siblings, field


def _is_container(annotation: Any) -> bool:
    return any(get_origin(inner) in (dict, tuple) for inner in (annotation, *get_args(annotation)))


def _model(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation; no annotation here holds more than one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model(inner))), None)


def _description(field: FieldInfo) -> str | None:
    return field.description or _described(field.annotation)


def _described(annotation: Any) -> str | None:
    """The description of the first field that is nested in an annotation, such as that of a list's items."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        own = (note.description for note in notes if isinstance(note, FieldInfo) and note.description)
        return next(own, None) or _described(inner)
    return next((text for inner in get_args(annotation) if (text := _described(inner))), None)
