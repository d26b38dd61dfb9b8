"""The high-level `llama_cpp.Llama` keeps what it promises: specs/high_level.yaml."""

from __future__ import annotations

import copy

import numpy as np

from conformance.harness.bench import Bench, Case
from conformance.harness.bench.bench import Tokens
from conformance.harness.engine import ContextSettings, Logits
from conformance.harness.exam import NotDecidable, verifies
from conformance.harness.measure.deviation import Deviation, of_count, of_logits, worst

_SETTINGS = ContextSettings(n_ctx=1024, n_ubatch=32)


class Prompt(Case):
    """A prompt of `prompt_tokens`, after which `generated` tokens are generated."""

    text_seed: int
    prompt_tokens: int
    generated: int


class Edited(Prompt):
    """The prompt is sent again with another middle; `edited_at` is in hundredths of it."""

    edited_at: int


class Saved(Prompt):
    """Of the saved state `kept` hundredths are left."""

    kept: int


def _cold(bench: Bench, prompt: Tokens) -> Logits:
    """The logits after a prompt in a fresh context, [1, n_vocab]."""
    return bench.cold(_SETTINGS, prompt[:-1], prompt[-1:])


def _greedy(bench: Bench, prompt: Tokens, tokens: list[int], first: Logits) -> Deviation:
    """Whether a generation is that of a cold run: the logits of its first token, and that this is the likeliest."""
    expected = _cold(bench, prompt)
    return worst([of_logits(first, expected), of_count(tokens[0], int(first.argmax()), "the first token", "")])


@verifies("SM-12/second-completion", case=Prompt)
def test_a_second_completion_is_as_in_a_new_instance(bench: Bench, case: Prompt) -> Deviation:
    first, second = bench.texts(case.text_seed, case.prompt_tokens, case.prompt_tokens)
    with bench.high_level() as llama:
        llama.generate(first, case.generated)
        again = _greedy(bench, second, *llama.generate(second, case.generated))
        return worst([again, _greedy(bench, second, *llama.generate(second, case.generated))])


@verifies("SM-12/high-level-edited-history", case=Edited)
def test_an_edited_history_is_as_in_a_new_instance(bench: Bench, case: Edited) -> Deviation:
    prompt, other = bench.texts(case.text_seed, case.prompt_tokens, case.prompt_tokens)
    at = max(1, case.edited_at * case.prompt_tokens // 100)
    edited = np.concatenate([prompt[:at], other[: len(prompt) - at]])
    with bench.high_level() as llama:
        llama.generate(prompt, case.generated)
        return _greedy(bench, edited, *llama.generate(edited, case.generated))


@verifies("SM-12/loaded-state", case=Prompt)
def test_a_loaded_state_continues_in_a_new_instance(bench: Bench, case: Prompt) -> Deviation:
    prompt, following = bench.texts(case.text_seed, case.prompt_tokens, case.generated)
    with bench.high_level() as llama, bench.high_level() as other:
        llama.eval(prompt)
        other.load(llama.save())
        return of_logits(other.eval(following), bench.cold(_SETTINGS, prompt, following))


@verifies("SM-12/high-level-truncated-load-state", case=Saved)
def test_a_state_that_is_refused_leaves_the_instance_empty_or_as_it_was(bench: Bench, case: Saved) -> Deviation:
    prompt, following = bench.texts(case.text_seed, case.prompt_tokens, case.generated)
    with bench.high_level() as llama:
        llama.eval(prompt)
        state = copy.copy(llama.save())
        state.llama_state_size = len(state.llama_state) * case.kept // 100
        state.llama_state = state.llama_state[: state.llama_state_size]
        try:
            llama.load(state)
        except RuntimeError:
            history = [prompt] if llama.n_tokens else []
            try:
                rows = llama.eval(following)
            except RuntimeError as error:
                return Deviation(
                    1.0, "instances that are of no use", "decoding after a refused state", "works", str(error)
                )
            return of_logits(rows, bench.cold(_SETTINGS, *history, following))
        raise NotDecidable("the cut state was accepted")


@verifies("SM-12/high-level-sample-after-load-state", case=Prompt)
def test_sampling_right_after_a_state_was_loaded_gives_a_token_or_an_error(bench: Bench, case: Prompt) -> Deviation:
    (prompt,) = bench.texts(case.text_seed, case.prompt_tokens)
    with bench.high_level() as llama, bench.high_level() as other:
        llama.eval(prompt)
        expected = llama.sample()
        other.load(llama.save())
        try:
            token = other.sample()
        except (RuntimeError, ValueError):
            return Deviation(0.0, "share of wrong tokens")
        return of_count(token, expected, "the sampled token", "")


@verifies("SM-12/reset", case=Prompt)
def test_after_a_reset_a_prompt_is_as_in_a_new_instance(bench: Bench, case: Prompt) -> Deviation:
    first, second = bench.texts(case.text_seed, case.prompt_tokens, case.prompt_tokens)
    with bench.high_level() as llama:
        llama.eval(first)
        llama.reset()
        return of_logits(llama.eval(second), bench.cold(_SETTINGS, second))
