"""The engines that give the right logits at the wrong time, by doing work that nobody asked for."""

from __future__ import annotations

import numpy as np

from conformance.harness.engine import Blob, Context, ContextSettings, Model, StateFlags, TokenBatch

_MUCH = 24  # tokens; several times the work of any single one here
_WINDOW = 100


class _WorksMore(Context):
    """Decodes other tokens in a context of its own for every single token that it is given."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        super().__init__(model, settings)
        self._other = Context(model, ContextSettings(n_ctx=256))

    def process(self, batch: TokenBatch) -> int:
        code = super().process(batch)
        n = self._more(batch) if len(batch) == 1 else 0
        if n:
            self._other.clear(contents=False)
            before = self._other.seconds
            self._other.decode(np.zeros(min(n, 256), np.int32), start=0, outputs="none")
            self.seconds += self._other.seconds - before
        return code

    def _more(self, batch: TokenBatch) -> int:
        """How many tokens more."""
        raise NotImplementedError

    def close(self) -> None:
        self._other.close()
        super().close()


class SlowAfterRestore(_WorksMore):
    """Works more once a state was restored."""

    _restored = False

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        self._restored = True
        return super().load(blob, sequence, flags)

    def _more(self, batch: TokenBatch) -> int:
        return _MUCH if self._restored else 0


class SlowerWithEveryRestore(_WorksMore):
    """Works more for every state that was restored."""

    _restores = 0

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        self._restores += 1
        return super().load(blob, sequence, flags)

    def _more(self, batch: TokenBatch) -> int:
        return self._restores


class SlowerWithDepth(_WorksMore):
    """Works more for every 128 tokens of context."""

    def _more(self, batch: TokenBatch) -> int:
        return 0 if batch.positions is None else int(batch.positions[0]) // 128


class SlowerWhenShort(_WorksMore):
    """Works more for every 32 tokens that its context could hold and does not."""

    def _more(self, batch: TokenBatch) -> int:
        return 0 if batch.positions is None else max(self.n_ctx - int(batch.positions[0]), 0) // 32


class NativeTailSlowerWhenShort(SlowerWhenShort):
    """The same, of a build that offers a tail of its own."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        super().__init__(model, (settings or ContextSettings()).changed(kv_tail=0))


class SlowInOtherSequences(_WorksMore):
    """Works more in every sequence but the first."""

    def _more(self, batch: TokenBatch) -> int:
        return 0 if batch.sequences == 0 else _MUCH


class SlowAfterRemoval(_WorksMore):
    """Works more once a sequence was removed."""

    _removed = False

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        self._removed = True
        return super().seq_rm(sequence, begin, end)

    def _more(self, batch: TokenBatch) -> int:
        return _MUCH if self._removed else 0


class KeepsAWindow(Context):
    """Keeps no more than the last 100 tokens when a single one is decoded."""

    def process(self, batch: TokenBatch) -> int:
        last = self.pos_max(0)
        if len(batch) == 1 and last - self.pos_min(0) > _WINDOW:
            self.seq_rm(0, 0, last - _WINDOW)
            window = self.save(0)
            self.clear()
            self.load(window, 0)
        return super().process(batch)


class SlowImages(Context):
    """Decodes every image twice, the first time for nothing."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        super().__init__(model, settings)
        self._other = Context(model, settings)

    def process(self, batch: TokenBatch) -> int:
        if batch.embeddings is not None:
            self._other.clear(contents=False)
            self._other.process(batch)
        return super().process(batch)

    def close(self) -> None:
        self._other.close()
        super().close()
