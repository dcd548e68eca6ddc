"""The text of an unfinished canvas: what an answer would be if it were committed now.

For clients that replace the text with each chunk. Nothing of it is promised.
"""

from typing import TYPE_CHECKING

from dgemma.server.guest import Errand

if TYPE_CHECKING:
    from dgemma.engine import Draft, Text
    from dgemma.engine.options import Plan
    from dgemma.text.tokenizer import StopIds, Tokenizer


class Rough:
    """One answer as it stands, from the drafts and texts it reports."""

    def __init__(self, plan: "Plan | Errand", tokenizer: "Tokenizer", stops: "StopIds") -> None:
        self.plan, self.tokenizer, self.stops = plan, tokenizer, stops
        self.answer = self.thought = ""  # promised
        self.shown = ("", "")  # the last that was drawn, or promised since
        self._before = ("", "")  # promised before the first canvas, by the AR part of hybrid mode
        self._blocks: list[int] = []  # tokens of finished canvases
        self._draft: Draft | None = None

    def promise(self, text: "Text") -> None:
        if text.is_thought:
            self.thought += text.text
            self.shown = (self.shown[0], self.thought)
        else:
            self.answer += text.text
            self.shown = (self.answer, self.shown[1])

    def draw(self, draft: "Draft") -> tuple[str, str]:
        """Answer and thought with this canvas as it stands."""
        from dgemma.text.reply import parse_reply
        from dgemma.text.stream import StopStrings

        assert not isinstance(self.plan, Errand), "an errand promises its text in one piece"
        self._turn_to(draft)
        ids, _ = self.stops.cut([*self._blocks, *draft.guess])
        in_thought = self.plan.prompt.in_thought and self.plan.mode == "diffusion"
        reply = parse_reply(self.tokenizer, ids[: self.plan.max_tokens], in_thought=in_thought)
        stops = StopStrings(self.plan.options.stop)
        answer = stops.feed(reply.answer) + stops.finish()
        self.shown = (self._before[0] + answer, self._before[1] + reply.thought)
        return self.shown

    def _turn_to(self, draft: "Draft") -> None:
        """Note what stands before this canvas."""
        assert not isinstance(self.plan, Errand)
        last, self._draft = self._draft, draft
        if last is None:
            self._before = (self.answer, self.thought)
        elif draft.block == last.block:
            return
        elif self.plan.options.guide is None:
            self._blocks += last.guess
        else:  # only a part of a canvas that is held to a grammar is committed
            self._blocks = self._still_thinking(last)
            self._before = (self.answer, self.thought)

    def _still_thinking(self, last: "Draft") -> list[int]:
        """The token that opens a thought, where the last canvas seems to have left one open.

        Its end may have been written for the model; then drafts are shown as the thought until
        their text is promised.
        """
        opens = self.tokenizer.control_ids.get("<|channel>")
        was_open = bool(self._blocks) or last.guess[0] == opens
        is_closed = any(self.tokenizer.is_control(token) for token in last.guess[1:])
        return [opens] if was_open and opens is not None and not is_closed else []
