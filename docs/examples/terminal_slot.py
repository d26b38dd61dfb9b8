"""An agent loop over a terminal slot, small enough to lift: python docs/examples/terminal_slot.py [MODEL.gguf]

The agent here presses a button on a screen that changes with every press. Its prompt is the preamble, all that was said,
and the newest three screenshots. Whatever the number of steps, only the new text and these three are prefilled.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import numpy as np

from conformance.harness.arms.replay import checkpoints_for
from conformance.harness.arms.terminal_slot import Cursor, Image, TerminalSlot
from conformance.harness.engine import Context, ContextSettings, Library, Model
from fixtures import models

WINDOW, STEPS, ACTION_TOKENS = 3, 8, 6
PREAMBLE = "<|im_start|>system\nYou press buttons.<|im_end|>\n"
TURN = "<|im_start|>assistant\n"


def screenshot(step: int, n_embd: int) -> Image:
    """What the screen shows at a step: noise, where an agent of yours would ask its vision tower."""
    width, height = 8, 6
    values = np.random.default_rng(step).standard_normal((width * height, n_embd), np.float32)
    return Image(values, width, height)


def main(path: Path) -> None:
    """Run the loop and print what each step took."""
    with Model(Library(), path) as model, Context(model, ContextSettings(n_ctx=1024)) as context:
        slot = TerminalSlot(
            Cursor(context, components=model.positions_per_embedding, checkpoints=checkpoints_for(model))
        )
        slot.begin(model.tokenize(PREAMBLE))
        start, end = model.tokenize("<|vision_start|>"), model.tokenize("<|vision_end|>")
        seen: deque[Image] = deque(maxlen=WINDOW)
        for step in range(1, STEPS + 1):
            seen.append(screenshot(step, model.n_embd_inp))
            window = [part for image in seen for part in (start, image, end)]
            logits = slot.look([*window, model.tokenize(TURN)])
            action = []
            for _ in range(ACTION_TOKENS):
                action.append(int(logits.argmax()))
                logits = slot.decode(action[-1])
            print(
                f"step {step}: {slot.checkpoint.cells} cells of text behind the checkpoint, {slot.cursor.cells} in all, "
                f"{slot.checkpoint.n_bytes:,} bytes kept, action {action}"
            )
            slot.remember([*model.tokenize(TURN), *action, *model.tokenize("<|im_end|>\n")])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else models.path("holo3-mini"))
