"""Committed ids to promised text, thought and calls, up to a stop string."""

from collections.abc import Sequence

from dgemma.engine.events import Text
from dgemma.text.reply import (
    ENDINGS,
    AnswerText,
    Reply,
    ReplyEvent,
    ReplyParser,
    ThoughtText,
)
from dgemma.text.stream import StopStrings
from dgemma.text.tokenizer import Tokenizer


class Reader:
    """Reads one reply. Stop strings cut the answer alone; a thought may speak of them."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], *, in_thought: bool) -> None:
        self.parser = ReplyParser(tokenizer, in_thought=in_thought)
        self.tokenizer, self.stops = tokenizer, StopStrings(stop)
        self.can_stop, names = bool(stop), tokenizer.control_ids
        self.control = frozenset(names.values())
        self.endings = frozenset(names[name] for name in ENDINGS if name in names)
        self.events: list[ReplyEvent] = []
        self.ids: list[int] = []

    @property
    def has_stopped(self) -> bool:
        return self.stops.stopped_by is not None

    @property
    def reply(self) -> Reply:
        return Reply.collect(self.events)

    def feed(self, ids: Sequence[int]) -> list[Text]:
        """Take ids until a stop string is complete; what follows it is no part of the reply."""
        if self.has_stopped or self.parser.has_ended:
            return []
        if self.can_stop and self._may_stop_in(ids):
            return self._feed_singly(ids)
        texts = self._promise(self.parser.feed(ids))
        end = next((place for place, token in enumerate(ids) if token in self.endings), len(ids))
        self.ids += ids[:end]
        return _joined(texts)

    def _may_stop_in(self, ids: Sequence[int]) -> bool:
        """Whether a stop string may be complete behind these ids; a control token parts text."""
        is_plain = self.control.isdisjoint(ids)
        return not is_plain or self.stops.may_stop_in(self.tokenizer.decode_bytes(ids))

    def _feed_singly(self, ids: Sequence[int]) -> list[Text]:
        """Token by token: it matters which of them completes a stop string."""
        texts: list[Text] = []
        for token in ids:
            if self.has_stopped or self.parser.has_ended:
                break
            texts += self._promise(self.parser.feed([token]))
            if not self.parser.has_ended:
                self.ids.append(token)
        return _joined(texts)

    def close(self) -> list[Text]:
        """What was held back for a character or stop string that never came."""
        texts = self._promise(self.parser.finish())
        held = self.stops.finish()
        self.events.append(AnswerText(text=held))
        return _joined([*texts, Text(text=held)])

    def _promise(self, events: list[ReplyEvent]) -> list[Text]:
        texts = []
        for event in events:
            if isinstance(event, AnswerText):
                event = AnswerText(text=self.stops.feed(event.text))
            self.events.append(event)
            if isinstance(event, AnswerText | ThoughtText):
                is_thought = isinstance(event, ThoughtText)
                texts.append(Text(text=event.text, is_thought=is_thought))
        return texts


def _joined(texts: list[Text]) -> list[Text]:
    """Neighbours of the same kind as one, empty ones left out."""
    joined: list[Text] = []
    for text in texts:
        if joined and joined[-1].is_thought == text.is_thought:
            last = joined.pop()
            text = Text(text=last.text + text.text, is_thought=text.is_thought)
        joined.append(text)
    return [text for text in joined if text.text]
