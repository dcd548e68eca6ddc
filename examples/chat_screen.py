"""Drive `dgemma chat` in a real terminal (tmux), as a person would, and keep what the screen shows.

    python -m examples.chat_screen nano docs/chat-screen.txt

A message of several lines, a replay, an interrupted answer, the conversation so far.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4


class Screen:
    """A terminal of its own, closed with everything in it at the end."""

    def __init__(self, command: list[str], width: int = 92, height: int = 40) -> None:
        self.name = f"dgemma-{uuid4().hex[:8]}"
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("new-session", "-d", "-s", self.name, *size, shlex.join(command))

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        kill = ["tmux", "-L", self.name, "kill-server"]
        subprocess.run(kill, capture_output=True, check=False)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-t", self.name, "-l", text)

    def say(self, line: str) -> None:
        self.type(line)
        self.press("Enter")

    def press(self, key: str) -> None:
        self._tmux("send-keys", "-t", self.name, key)

    def text(self) -> str:
        return self._tmux("capture-pane", "-t", self.name, "-p", "-S", "-200").rstrip()

    def wait_for(self, text: str, count: int = 1, seconds: float = 60) -> str:
        """Return the screen once it shows `text` so many times."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (shown := self.text()).count(text) >= count:
                return shown
            time.sleep(0.05)
        raise TimeoutError(f"no {text!r} within {seconds} s; the screen shows:\n{self.text()}")

    def wait_for_answer(self, question: str, seconds: float = 60) -> None:
        """Wait until something is shown after a question."""
        end = time.monotonic() + seconds
        while not self.text().partition(question)[2].strip():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no answer within {seconds} s; the screen shows:\n{self.text()}"
                )
            time.sleep(0.05)

    def _tmux(self, *arguments: str) -> str:
        call = ["tmux", "-L", self.name, *arguments]  # a server of its own
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def chat_command(model: Path | str, *options: str) -> list[str]:
    start = "from dgemma.cli import main; main()"
    fixed = ["--device", "cpu", "--dtype", "float32", "--seed", "3"]
    return [sys.executable, "-c", start, "chat", "--model", str(model), *fixed, *options]


def main() -> None:
    model, output = sys.argv[1:]
    with Screen(chat_command(model)) as screen:
        screen.wait_for("/help")
        screen.type("Change cat to dog.")
        screen.press("M-Enter")
        screen.press("M-Enter")
        screen.say("The cat sat on the mat. The cat was happy.")
        screen.wait_for("[diffusion:")
        screen.say("/replay")
        screen.wait_for("[replayed")
        screen.say("/clear")
        screen.say("/mode ar")
        screen.say("Write a long story about a girl and a kite.")
        screen.wait_for_answer("and a kite.\n")
        screen.press("C-c")
        screen.wait_for("[stopped")
        screen.say("/history")
        shown = screen.wait_for("assistant: ")
    Path(output).write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
