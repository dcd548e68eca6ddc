"""`dgemma chat`: a conversation with a live canvas."""

from typing import Annotated

import typer

from dgemma.cli.app import FAILED, Adapter, Device, Dtype, Model, Quant, app


@app.command()
def chat(
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    adapter: Adapter = None,
    mode: Annotated[str, typer.Option(help="diffusion, ar or hybrid (AR thought).")] = "diffusion",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = False,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
) -> None:
    """Talk with the model; /help lists what can be said to the program itself."""
    from dgemma.cli.conversation import Conversation, Settings, talk
    from dgemma.cli.loading import load_engine
    from dgemma.engine.options import check_options

    settings = Settings(mode=mode, seed=seed, thinking=thinking, max_tokens=max_tokens)
    check_options(settings.options())  # before a long load
    engine = load_engine(model, device, dtype, adapter, quant)
    if not talk(Conversation(engine, settings, system)):
        raise typer.Exit(FAILED)
