"""Parser of a reply: token ids to answer, thought and tool calls, as blocks are committed.

    <|channel>thought\\n ... \\n<channel|>answer
    <|tool_call>call:NAME{...}<tool_call|> ... <|tool_response>

Ids decide, never spelled text. Output that violates the protocol is read like this:
- every channel is a thought; one that does not begin with `thought\\n` keeps its whole text;
- the line break before `<channel|>` is not part of the thought; several thoughts are joined by one;
- a call inside a thought does not end it; a channel, another call or the end breaks a call off;
- a misplaced control token is left out of the text, and reported;
- `<turn|>`, `<eos>` and `<|tool_response>` end the reply: the rest of the canvas is padding.

`ReplyReader` reads a reply that is being written: it applies stop strings to the parser's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dgemma.errors import UsageError
from dgemma.text import control_tokens as control
from dgemma.text.detokenizer import Detokenizer, StopStrings
from dgemma.text.messages import ToolCall
from dgemma.text.tokenizer import Tokenizer
from dgemma.text.tool_calls import QUOTE, MalformedCall, parse_call

CHANNEL_OPENING = "thought\n"
ENDINGS = frozenset({control.TURN_END, control.EOS, control.TOOL_RESPONSE})
CALL_BREAKS = ENDINGS | {control.CHANNEL, control.TOOL_CALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Committed text."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtText:
    """More of the thought."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCall:
    """A tool call that cannot be read: its text without the outer markers, and why."""

    raw: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayToken:
    """A misplaced control token, left out of the text."""

    token: str


ReplyEvent = AnswerText | ThoughtText | ToolCall | BrokenCall | StrayToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply. Its calls are numbered `call_0`, `call_1`, ... in order."""

    answer: str = ""
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    broken_calls: tuple[BrokenCall, ...] = ()
    stray_tokens: tuple[str, ...] = ()

    @classmethod
    def collect(cls, events: Iterable[ReplyEvent]) -> Reply:
        """Fold the events of one reply into the whole."""
        events = list(events)
        return cls(
            answer="".join(event.text for event in events if isinstance(event, AnswerText)),
            thought="".join(event.text for event in events if isinstance(event, ThoughtText)),
            tool_calls=tuple(event for event in events if isinstance(event, ToolCall)),
            broken_calls=tuple(event for event in events if isinstance(event, BrokenCall)),
            stray_tokens=tuple(event.token for event in events if isinstance(event, StrayToken)),
        )


def parse_reply(tokenizer: Tokenizer, ids: Iterable[int], *, in_thought: bool = False) -> Reply:
    """Parse a reply that is already whole."""
    parser = ReplyParser(tokenizer, in_thought=in_thought)
    return Reply.collect([*parser.feed(ids), *parser.finish()])


class ReplyParser:
    """Reads a reply block by block; `in_thought` is the prompt's."""

    def __init__(self, tokenizer: Tokenizer, *, in_thought: bool = False) -> None:
        self._tokenizer = tokenizer
        self._control_names = {token: name for name, token in tokenizer.control_ids.items()}
        self._text = Detokenizer(tokenizer)
        self._thought = _Thought()
        self._in_thought = in_thought
        self._call: list[int] | None = None
        self._num_calls = 0
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """True once an ending token was read: nothing after it is part of the reply."""
        return self._has_ended

    def feed(self, ids: Iterable[int]) -> list[ReplyEvent]:
        """Take the ids of a block, return the events they complete."""
        events: list[ReplyEvent] = []
        plain: list[int] = []
        for token in ids:
            if self._has_ended:
                return events
            if token not in self._control_names:
                plain.append(token)
                continue
            events += self._read_plain(plain)
            plain = []
            events += self._read_control(token)
        return events + self._read_plain(plain)

    def finish(self) -> list[ReplyEvent]:
        """Return the events held back; no more ids will come."""
        if self._has_ended:
            return []
        return self._end()

    def _read_plain(self, ids: list[int]) -> list[ReplyEvent]:
        if self._call is None:
            return self._events(self._text.feed(ids))
        self._call += ids
        return []

    def _read_control(self, token: int) -> list[ReplyEvent]:
        name = self._control_names[token]
        if self._call is not None and name not in CALL_BREAKS:
            return self._read_in_call(token, name)
        if name in ENDINGS:
            return self._end()
        # A character cannot span a control token.
        events = self._events(self._text.finish()) + self._break_call()
        match name:
            case control.CHANNEL:
                events += self._close_thought()
                self._thought.open()
                self._in_thought = True
            case control.CHANNEL_END if self._in_thought:
                events += self._close_thought()
                self._in_thought = False
            case control.TOOL_CALL:
                self._call = []
            case _:
                events.append(StrayToken(token=name))
        return events

    def _read_in_call(self, token: int, name: str) -> list[ReplyEvent]:
        assert self._call is not None
        if name != control.TOOL_CALL_END:
            self._call.append(token)
            return []
        ids, self._call = self._call, None
        stray = {self._control_names[token] for token in ids if token in self._control_names}
        stray.discard(control.STRING_QUOTE)
        if stray:
            return [self._broken(ids, f"it contains the control token {min(stray)}")]
        return [self._read_call(ids)]

    def _read_call(self, ids: list[int]) -> ToolCall | BrokenCall:
        try:
            name, arguments = parse_call(self._call_body(ids))
            call = ToolCall(id=f"call_{self._num_calls}", name=name, arguments=arguments)
        except (MalformedCall, UsageError) as error:
            return self._broken(ids, str(error))
        self._num_calls += 1
        return call

    def _call_body(self, ids: list[int]) -> str:
        """Decode a call, with each `<|"|>` control token replaced by QUOTE."""
        pieces: list[list[int]] = [[]]
        for token in ids:
            if self._tokenizer.is_control(token):
                pieces.append([])
            else:
                pieces[-1].append(token)
        return QUOTE.join(map(self._tokenizer.decode, pieces))

    def _broken(self, ids: list[int], reason: str) -> BrokenCall:
        return BrokenCall(raw=self._tokenizer.decode(ids), reason=reason)

    def _break_call(self) -> list[ReplyEvent]:
        ids, self._call = self._call, None
        return [] if ids is None else [self._broken(ids, "it was not closed by <tool_call|>")]

    def _close_thought(self) -> list[ReplyEvent]:
        text = self._thought.close() if self._in_thought else ""
        return [ThoughtText(text=text)] if text else []

    def _end(self) -> list[ReplyEvent]:
        self._has_ended = True
        events = self._events(self._text.finish())
        return events + self._break_call() + self._close_thought()

    def _events(self, text: str) -> list[ReplyEvent]:
        if self._in_thought:
            text = self._thought.feed(text)
            return [ThoughtText(text=text)] if text else []
        return [AnswerText(text=text)] if text else []


class _Thought:
    """The text of thought channels without their names and closing line breaks."""

    def __init__(self) -> None:
        self._opening: str | None = None  # the channel's name so far, while it is read
        self._line_break = ""  # held back: the last one belongs to the closing token
        self._has_text = False

    def open(self) -> None:
        self._opening = ""

    def feed(self, text: str) -> str:
        if self._opening is not None:
            self._opening += text
            if len(self._opening) < len(CHANNEL_OPENING) and CHANNEL_OPENING.startswith(
                self._opening
            ):
                return ""
            text, self._opening = self._opening.removeprefix(CHANNEL_OPENING), None
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        self._has_text |= bool(text)
        return text

    def close(self) -> str:
        opening, self._opening = self._opening, None
        # A name cut short of "thought" is not one: keep it.
        text = self.feed(opening) if opening and opening + "\n" != CHANNEL_OPENING else ""
        # Separates this thought from the next one, if any.
        self._line_break = "\n" if self._has_text else ""
        return text


class ReplyReader:
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
        """Take ids until a stop string is complete; what follows it is not part of the reply."""
        if self.has_stopped or self.parser.has_ended:
            return []
        if self.can_stop and self._may_stop_in(ids):
            return self._feed_singly(ids)
        texts = self._commit(self.parser.feed(ids))
        end = next((i for i, token in enumerate(ids) if token in self.endings), len(ids))
        self.ids.extend(ids[:end])
        return _merged(texts)

    def _may_stop_in(self, ids: Sequence[int]) -> bool:
        """True if a stop string may be complete after these ids; a control token splits text."""
        is_plain = self.control.isdisjoint(ids)
        return not is_plain or self.stops.may_stop_in(self.tokenizer.decode_bytes(ids))

    def _feed_singly(self, ids: Sequence[int]) -> list[Text]:
        """Take one token at a time, to see which of them completes a stop string."""
        texts: list[Text] = []
        for token in ids:
            if self.has_stopped or self.parser.has_ended:
                break
            texts += self._commit(self.parser.feed([token]))
            if not self.parser.has_ended:
                self.ids.append(token)
        return _merged(texts)

    def close(self) -> list[Text]:
        """Return text that was withheld for a character or stop string that was not completed."""
        texts = self._commit(self.parser.finish())
        rest = self.stops.finish()
        self.events.append(AnswerText(text=rest))
        return _merged([*texts, Text(text=rest)])

    def _commit(self, events: list[ReplyEvent]) -> list[Text]:
        texts = []
        for event in events:
            if isinstance(event, AnswerText):
                event = AnswerText(text=self.stops.feed(event.text))
            self.events.append(event)
            if isinstance(event, AnswerText | ThoughtText):
                is_thought = isinstance(event, ThoughtText)
                texts.append(Text(text=event.text, is_thought=is_thought))
        return texts


def _merged(texts: list[Text]) -> list[Text]:
    """Merge neighbours of the same kind; drop empty ones."""
    groups = groupby((text for text in texts if text.text), key=lambda text: text.is_thought)
    return [
        Text(text="".join(text.text for text in group), is_thought=is_thought)
        for is_thought, group in groups
    ]
