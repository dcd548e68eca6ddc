"""The application, the options that commands share, and loading: engines and rules."""

import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from dgemma.config import DEFAULT_MODE
from dgemma.errors import UsageError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.diffusion.sampler import Rule
    from dgemma.engine import Engine, SamplingParams

# Largest first. The same names as in `weights.gguf_write`, which would import torch.
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_0", "Q4_K_M", "Q4_K", "Q4_0")
MIN_SHOWN_BYTES = 1 << 30  # smaller checkpoints load without a progress bar

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

RULES = (
    "Rule of the sampler: entropy, the default, confidence, or MODULE:CLASS for a custom rule "
    "(docs/python.md)."
)
MODE_HELP = "diffusion, ar, hybrid (AR thought) or auto (what is faster here)."
PRESETS = "Sampler preset: quality, balanced or fast (docs/python.md)."

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """Options of commands that denoise canvases."""

    seed: int | None = option(None, "Seed; the same seed gives the same text.")
    preset: str | None = option(None, PRESETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions(SamplerOptions):
    """Options of commands that answer a message."""

    mode: str = option(DEFAULT_MODE, MODE_HELP)
    temperature: float | None = option(None, "Temperature of draws; AR is greedy by default.")
    max_tokens: int | None = option(None, "Longest answer.")
    thinking: bool = option(False, "Let the model think first.", "--thinking/--no-thinking")

    def params(self, *, drafts: bool = False) -> "SamplingParams":
        """Return the parameters of a request; AR mode has no drafts."""
        from dgemma.engine import SamplingParams

        return SamplingParams(
            mode=self.mode,  # type: ignore[arg-type]  # checked by check_params
            seed=self.seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            drafts=drafts and self.mode != "ar",
        )


app = typer.Typer(
    name="dgemma",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        from dgemma import __version__

        print(f"dgemma {__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show and exit."),
    ] = False,
) -> None:
    """DiffusionGemma on your own machine: a canvas of text is refined step by step."""


def with_options(function: Callable[..., R]) -> Callable[..., R]:
    """Replace each dataclass parameter by one option per field with a `help`."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(
                parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    @wraps(function)
    def command(**given: Any) -> R:
        values = {
            name: kind(**{option.name: given.pop(option.name) for option in _options(kind)})
            for name, kind in groups.items()
        }
        return function(**given, **values)

    # Read by Typer, and by the messages for wrong numbers.
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def option_hints(callback: Any) -> dict[str, Any]:
    """Return the annotated types of a command's options, those of dataclasses included."""
    command = inspect.unwrap(callback, stop=lambda function: hasattr(function, "__signature__"))
    return get_type_hints(command, include_extras=True)


def _options(kind: Any) -> list[Parameter]:
    """Return the fields of a dataclass that have a `help` as options of a command."""
    hints = get_type_hints(kind)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], _typer_option(field)],
        )
        for field in fields(kind)
        if "help" in field.metadata
    ]


def _typer_option(field: Field[Any]) -> Any:
    flags = field.metadata["flags"] or (f"--{field.name.replace('_', '-')}",)
    return typer.Option(*flags, help=field.metadata["help"], **field.metadata["settings"])


def load_engine(
    options: ModelOptions, preset: str | None = None, rule: "Rule | None" = None
) -> "Engine":
    """Load a checkpoint; shows progress on stderr for a large one, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dgemma.engine import Engine

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    is_quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("loading", visible=False)

        def on_tensor(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=total > MIN_SHOWN_BYTES)

        return Engine.load(**asdict(options), progress=on_tensor, rule=rule, preset=preset)


# --- rules

OWN_RULE = re.compile(r"[\w.]+:\w+")
TEST_LENGTH, TEST_VOCAB = 8, 16  # canvas that a rule is tested on


def load_rule(name: str | None) -> "Rule | None":
    """Return the sampler's rule of a name, tested on a small canvas; None: the checkpoint's."""
    from dgemma.diffusion.rules import Confidence
    from dgemma.diffusion.sampler import Sampler

    if name in (None, "entropy"):
        return None
    if name == "confidence":
        return Confidence()
    if not OWN_RULE.fullmatch(name):
        raise UsageError(f"rule {name!r} is not known; use entropy, confidence or MODULE:CLASS")
    rule: Rule = _make_rule(name)
    Sampler(rule=rule)  # refuses objects without `decide`
    try:
        _test_rule(rule)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"rule {name} fails on a canvas of {TEST_LENGTH} tokens: "
            f"{type(error).__name__}: {error}"
        ) from error
    return rule


def _make_rule(name: str) -> Any:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # like `python -m`
    try:
        found = getattr(import_module(module), attribute)
    except AttributeError:
        raise UsageError(f"rule {name}: module {module} has no {attribute}") from None
    except Exception as error:
        raise UsageError(
            f"rule {name}: module {module} cannot be imported: {type(error).__name__}: {error}; a "
            "module is looked for in the working directory first"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    try:
        return found()
    except TypeError as error:
        raise UsageError(
            f"rule {name} cannot be made without arguments ({error}); give its fields defaults"
        ) from None


def _test_rule(rule: "Rule") -> None:
    """Take two steps of a canvas with a pin, with made-up statistics."""
    import torch

    from dgemma.diffusion.canvas import Pins, initial_canvas
    from dgemma.diffusion.logit_stats import PositionStats
    from dgemma.diffusion.rules import checked
    from dgemma.diffusion.sampler import Sampler, advance

    rule = checked(Sampler(rule=rule)).rule
    noise_L = torch.arange(TEST_LENGTH)
    canvas = initial_canvas(noise_L, Pins((0,), (1,)))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        p_LV = torch.rand(TEST_LENGTH, TEST_VOCAB, generator=generator).softmax(-1)
        top_p_L, top_L = p_LV.max(-1)
        current_p_L = p_LV.gather(-1, canvas.tokens_L[:, None])[:, 0]
        entropy_L = torch.special.entr(p_LV).sum(-1)
        stats = PositionStats(
            draw_T=top_L, top_T=top_L, entropy_T=entropy_L, top_p_T=top_p_L, current_p_T=current_p_L
        )
        canvas = advance(canvas, stats, noise_L, rule)
